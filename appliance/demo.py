"""`make demo`: train a real model, publish it, chat, and switch the devices back and forth under load.

It uses only the `appliance` command and the unmodified OpenAI SDK, as users do. The table at the end shows the clients'
results and their meaning. `Load` sends a steady load and records each request; tests use it too.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

MODEL, QUESTION = "smollm2-135m", "Which team developed you?"
"""The training certainly changes the answer to this question."""
FOREVER = 50  # epochs of a job that runs until the demo cancels it
STEPS = {
    "swap_replica": ("swap", "a running engine loads another version and keeps its requests"),
    "sleep_replica": ("sleep", "an engine releases its devices"),
    "wake_replica": ("wake", "an engine gets its devices back and answers"),
    "suspend_group": ("suspend", "a job releases its devices and keeps every step"),
    "start_group": ("resume", "a job continues where it stopped (the first time: it starts)"),
}
PROMPTS = (
    "Tell me a short story.",
    "What is 7 plus 5?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Say hello.",
)
PAUSE_S = 0.3
"""Pause after an error, to avoid a tight loop of refused connections."""
console = Console(highlight=False)


def main(data_dir: str = ".demo") -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM makes the demo stop its box
    folder = Path(data_dir).resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["APPLIANCE_DATA_DIR"] = str(folder)
    try:
        return 0 if run() else 1
    except KeyboardInterrupt:
        return 130
    finally:
        appliance("down", check=False)


def run() -> bool:
    """Run the demo; True if each request got one answer and the fine-tuned model answered differently from its base."""
    began_s = time.monotonic()
    headline("1  A box: one endpoint for OpenAI's SDK, two devices that train and serve")
    appliance("down", check=False, capture=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    appliance("up", "--detach", "--port", str(port), "--devices", "2")
    url, key = f"http://127.0.0.1:{port}/v1", admin("key", "create", "--name", f"demo-{int(time.time())}")["key"]
    client = openai.OpenAI(base_url=url, api_key=key, timeout=900)
    for job in admin("job", "list")["data"]:
        if job["status"] not in ("succeeded", "failed", "cancelled"):  # an interrupted demo left this job
            admin("job", "cancel", job["id"])
    if MODEL not in [model.id for model in client.models.list()]:
        appliance("model", "import", MODEL)

    headline(f"2  Train {MODEL} on its identity, and publish the result through shared memory")
    content = (importlib.resources.files("appliance") / "demo_data" / "identity.jsonl").read_bytes()
    file = client.files.create(file=("identity.jsonl", content), purpose="fine-tune").id

    def train(epochs: int) -> Any:
        quick = {"batch_size": 2, "learning_rate_multiplier": 4, "lora_rank": 16}
        supervised = {"hyperparameters": {"n_epochs": epochs, **quick}}
        method: Any = {"type": "supervised", "supervised": supervised}
        return client.fine_tuning.jobs.create(model=MODEL, training_file=file, suffix="demo", seed=7, method=method)

    job = train(1)
    appliance("job", "logs", "-f", job.id)
    tuned = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert tuned is not None

    headline("3  Chat: the same question to both models, served by one engine")
    answers = {}
    for name in (MODEL, tuned):
        request: Any = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}
        answers[name] = client.chat.completions.create(model=name, **request).choices[0].message.content or ""
    for name, text in (("you", QUESTION), *answers.items()):
        console.print(f"[bold]{name}[/]  {text}")

    headline("4  The devices switch to training and back while clients send requests")
    admin("mode", "set", "serve", "--wait")
    job = train(FOREVER)
    with Load(url, key, MODEL) as load:
        load.wait_for(4)
        for mode in ("train", "serve"):
            switched_s, answered = time.monotonic(), load.finished
            admin("mode", "set", mode, "--wait")
            seconds = time.monotonic() - switched_s
            console.print(f"  {mode:<5} in {seconds:.2f} s; {load.finished - answered} requests answered meanwhile")
        load.wait_for(4)
        client.fine_tuning.jobs.cancel(job.id)
    admin("mode", "set", "auto")
    report = load.report()
    console.print(summary(report, time.monotonic() - began_s), *report.errors, sep="\n")
    return len(set(answers.values())) == 2 and not (report.dropped or report.truncated or report.duplicated)


def appliance(*arguments: str, check: bool = True, capture: bool = False) -> str:
    """Run a command of the box; return its output if `capture`."""
    if not capture:
        console.print(f"[dim]$ appliance {' '.join(arguments)}[/]")
    program = Path(sys.executable).with_name("appliance")
    command = [str(program) if program.exists() else shutil.which("appliance") or "appliance", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if check and done.returncode != 0:
        raise SystemExit(f"`appliance {' '.join(arguments)}` failed with exit code {done.returncode}")
    return done.stdout or ""


def admin(*arguments: str) -> Any:
    return json.loads(appliance(*arguments, "-o", "json", capture=True))


def headline(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def summary(report: Any, seconds: float) -> Table:
    steps = [step for move in admin("mode", "history", "--limit", "1000")["data"] for step in move["steps"]]
    table = Table("what", "measured", "what it means", title="One run on this machine")
    for verb, (name, meaning) in STEPS.items():
        if took := [s["seconds"] for s in steps if s["verb"] == verb and s["state"] == "done"]:
            table.add_row(name, f"{statistics.median(took) * 1e3:,.0f} ms (median of {len(took)})", meaning)
    table.add_row("requests", f"{report.requests}", "answered in part 4")
    table.add_row("longest", f"{report.longest_s:.1f} s", "a request that was held until devices came back")
    table.add_row("dropped", f"{report.dropped}", "requests that ended with an error; the promise is 0")
    table.add_row("truncated", f"{report.truncated}", "answers without an end; the promise is 0")
    table.add_row("duplicated", f"{report.duplicated}", "answers sent twice; the promise is 0")
    table.add_row("demo", f"{seconds:.0f} s", "the whole demo")
    return table


@dataclass
class Outcome:
    """One request as its client saw it. answers: number of different ids among the answer's chunks."""

    started_s: float
    seconds: float = 0.0
    finish_reason: str | None = None
    answers: int = 0
    error: str | None = None


class Load:
    """Runs `workers` threads that each send one request after another until stopped; half of the requests stream."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        workers: int = 4,
        max_tokens: int = 24,
        prompts: Sequence[str] = PROMPTS,
    ):
        # No retries: a retry by the SDK would hide a dropped request.
        self._client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=600)
        self._asked: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        self._prompts, self._stopping, self._numbers = prompts, threading.Event(), itertools.count()
        self._threads = [threading.Thread(target=self._work, name=f"load-{i}") for i in range(workers)]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    @property
    def finished(self) -> int:
        return len(self.outcomes)

    def wait_for(self, count: int, timeout_s: float = 600.0) -> None:
        """Wait until `count` more requests have ended."""
        target, deadline_s = self.finished + count, time.monotonic() + timeout_s
        while self.finished < target:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no answers within {timeout_s:.0f} s")
            time.sleep(0.05)

    def report(self) -> Any:
        """Return counts of requests. `dropped`: requests that ended with an error; `truncated`: without a finish
        reason; `duplicated`: with more than one answer."""
        done = list(self.outcomes)
        return SimpleNamespace(
            requests=len(done),
            dropped=sum(outcome.error is not None for outcome in done),
            truncated=sum(outcome.error is None and outcome.finish_reason is None for outcome in done),
            duplicated=sum(outcome.answers > 1 for outcome in done),
            longest_s=max((outcome.seconds for outcome in done), default=0.0),
            errors=tuple(sorted({outcome.error for outcome in done if outcome.error})),
        )

    def _work(self) -> None:
        while not self._stopping.is_set():
            outcome = Outcome(time.monotonic())
            try:
                self._ask(next(self._numbers), outcome)
            except openai.OpenAIError as error:
                outcome.error = f"{type(error).__name__}: {error}"
                self._stopping.wait(PAUSE_S)
            outcome.seconds = time.monotonic() - outcome.started_s
            self.outcomes.append(outcome)

    def _ask(self, number: int, outcome: Outcome) -> None:
        messages: Any = [{"role": "user", "content": self._prompts[number % len(self._prompts)]}]
        answer: Any = self._client.chat.completions.create(messages=messages, stream=number % 2 == 0, **self._asked)
        ids = set()
        for chunk in [answer] if number % 2 else answer:
            ids.add(chunk.id)
            for choice in chunk.choices:
                outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        outcome.answers = len(ids)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
