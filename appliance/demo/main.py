"""`make demo`: train a real model, publish it, chat, and switch the devices back and forth under load.

Everything goes through what a user has: the `appliance` command and the unchanged OpenAI SDK. The table at the end has
what clients saw, and what it means.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from appliance.demo.load_generator import Load

MODEL, QUESTION = "smollm2-135m", "Which team developed you?"
"""The answer changes with the training for certain."""
HYPERPARAMETERS = {"n_epochs": 3, "lora_rank": 16, "publish": "epoch"}
FOREVER = 50  # epochs of a job that is cancelled before its end
STEPS = {
    "swap_replica": ("swap", "a running engine takes another version; its requests are kept"),
    "sleep_replica": ("sleep", "an engine gives its devices back"),
    "wake_replica": ("wake", "an engine has its devices again, and answers"),
    "suspend_group": ("suspend", "a job gives its devices back, and keeps every step"),
    "start_group": ("resume", "a job goes on where it was (the first time: it starts)"),
}
console = Console(highlight=False)


def main(data_dir: str = ".demo") -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the box outlives a demo that is ended
    box = DemoBox(Path(data_dir).resolve())
    try:
        return 0 if run(box) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        box.appliance("down", check=False)


def run(box: DemoBox) -> bool:
    """Returns whether every request was answered once, and the fine-tuned model answers otherwise than its base."""
    began_s = time.monotonic()
    headline("1  A box: one endpoint for OpenAI's SDK, eight devices that train and serve")
    box.up()
    if MODEL not in [model.id for model in box.client.models.list()]:
        box.appliance("model", "import", MODEL)
    before = box.ask(MODEL, QUESTION)

    headline(f"2  Train {MODEL} on who it is, and publish the result through shared memory")
    file = box.upload("identity.jsonl")
    job = box.train(file, HYPERPARAMETERS)
    box.appliance("job", "logs", "-f", job.id)
    tuned = box.client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    if tuned is None:
        raise SystemExit("the job did not succeed")

    headline("3  Chat: the same question to both models, each served by an engine")
    after = box.ask(tuned, QUESTION)
    for name, answer in (("you", QUESTION), (MODEL, before), (tuned, after)):
        console.print(f"[bold]{name}[/]  {answer}")

    headline("4  The devices switch to training and back, with clients that go on asking")
    job = box.train(file, HYPERPARAMETERS | {"n_epochs": FOREVER})
    box.admin("mode", "set", "serve", "--wait")
    with Load(box.url, box.key, MODEL) as load:
        wait_for_answers(load)
        for mode in ("train", "serve"):
            switched_s, answered = time.monotonic(), load.finished
            box.admin("mode", "set", mode, "--wait")
            seconds = time.monotonic() - switched_s
            console.print(f"  {mode:<5} in {seconds:.2f} s; {load.finished - answered} requests answered meanwhile")
            if mode == "train":
                time.sleep(2)  # it trains
            else:
                wait_for_answers(load)
        box.client.fine_tuning.jobs.cancel(job.id)
        box.admin("mode", "set", "auto", "--wait")
    summary(box, load, time.monotonic() - began_s)
    report = load.report()
    return before != after and not (report.dropped or report.truncated or report.duplicated)


class DemoBox:
    """The demo's own box, driven from outside."""

    def __init__(self, data_dir: Path):
        self.data_dir = data_dir
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def appliance(self, *arguments: str, check: bool = True, capture: bool = False) -> str:
        """Runs a command of the box. Returns what it prints if `capture`."""
        if not capture:
            console.print(f"[dim]$ appliance {' '.join(arguments)}[/]")
        program = Path(sys.executable).with_name("appliance")
        done = subprocess.run(
            [str(program) if program.exists() else shutil.which("appliance") or "appliance", *arguments],
            stdout=subprocess.PIPE if capture else None,
            text=True,
            env={**os.environ, "APPLIANCE_DATA_DIR": str(self.data_dir)},
        )
        if check and done.returncode != 0:
            raise SystemExit(f"`appliance {' '.join(arguments)}` failed with exit code {done.returncode}")
        return done.stdout or ""

    def admin(self, *arguments: str) -> Any:
        return json.loads(self.appliance(*arguments, "-o", "json", capture=True))

    def up(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.appliance("down", check=False, capture=True)
        self.appliance("up", "--detach", "--port", str(self.port))
        self.key = self.admin("key", "create", "--name", f"demo-{int(time.time())}")["key"]
        self.client = openai.OpenAI(base_url=self.url, api_key=self.key, timeout=900)
        for job in self.admin("job", "list")["data"]:
            if job["status"] not in ("succeeded", "failed", "cancelled"):  # of a demo that was stopped
                self.admin("job", "cancel", job["id"])

    def ask(self, model: str, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        answer = self.client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)
        return answer.choices[0].message.content or ""

    def upload(self, name: str) -> str:
        """The id of a file of demo_data."""
        content = (importlib.resources.files("appliance") / "demo_data" / name).read_bytes()
        return self.client.files.create(file=(name, content), purpose="fine-tune").id

    def train(self, file: str, hyperparameters: dict[str, Any]) -> Any:
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        return self.client.fine_tuning.jobs.create(
            model=MODEL, training_file=file, suffix="demo", seed=7, method=method
        )


def summary(box: DemoBox, load: Load, seconds: float) -> None:
    steps = [step for handover in box.admin("mode", "history", "--limit", "1000")["data"] for step in handover["steps"]]
    table = Table("what", "measured", "what it means", title="One run on this machine")
    for verb, (name, meaning) in STEPS.items():
        if took := [s["seconds"] for s in steps if s["verb"] == verb and s["state"] == "done"]:
            table.add_row(name, f"{statistics.median(took) * 1e3:,.0f} ms (median of {len(took)})", meaning)
    report = load.report()
    table.add_row("requests", f"{report.requests}", "answered in part 4")
    table.add_row("longest", f"{report.longest_s:.1f} s", "a request held until devices came back, whole")
    table.add_row("dropped", f"{report.dropped}", "requests that ended with an error; the promise is 0")
    table.add_row("truncated", f"{report.truncated}", "answers without their end; the promise is 0")
    table.add_row("duplicated", f"{report.duplicated}", "answers sent twice; the promise is 0")
    table.add_row("demo", f"{seconds:.0f} s", "all of this")
    console.print(table, *report.errors, sep="\n")


def wait_for_answers(load: Load, count: int = 4, timeout_s: float = 600.0) -> None:
    """Returns once so many more requests were answered."""
    wanted, deadline_s = load.finished + count, time.monotonic() + timeout_s
    while load.finished < wanted:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no answers for {timeout_s:.0f} s")
        time.sleep(0.05)


def headline(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
