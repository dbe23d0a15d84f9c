"""A whole box on this machine's GPUs, driven from outside as its users do: `python -m benchmarks.gpu.box --model FILE`.

Starts, sleeps, wakes, swaps and hand-overs of one real model while requests go on, each with what the GPUs' driver says
of the processes that hold memory: a rank that outlives its job and an engine that keeps too much are seen here and in
no test on processors. Writes `--results`, to be committed beside those of `make gpu-smoke`. `--model`: a GGUF file, a
directory or a name of `appliance model catalog`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from appliance.demo.load_generator import Load
from appliance.demo.main import HYPERPARAMETERS, MODEL, DemoBox
from runtime.devices.kinds import present

MB = 1e6
DEMO_DATA = Path(__file__).resolve().parents[2] / "appliance" / "demo_data"
PARTS = ("modes", "full", "swap", "kill", "methods")
FULL = {"n_epochs": 2, "full": True, "batch_size": 8, "learning_rate_multiplier": 1, "publish": "epoch"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"in this order, of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    run = Run(DemoBox(options.data_dir))
    parts = {
        "modes": lambda: run.modes(MODEL),
        "full": run.full,
        "swap": lambda: run.swap(run.full_model),
        "kill": lambda: run.kill(MODEL),
        "methods": lambda: run.methods(MODEL),
    }
    failed = []
    try:
        run.box.up()
        run.start(options.model)
        for name in options.parts.split(","):
            try:
                parts[name]()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts still tell
                failed.append(name)
                run.say(f"{name} FAILED", "".join(traceback.format_exception(error))[-3000:])
            options.results.write_text(json.dumps(run.found, indent=1) + "\n")
    finally:
        run.found["steps"] = run.steps()
        options.results.write_text(json.dumps(run.found, indent=1) + "\n")
        run.box.appliance("down", check=False)
    return bool(failed)


class Run:
    """What was found so far, by name; seconds, bytes and tokens/s."""

    def __init__(self, box: DemoBox):
        self.box, self.found, self._began_s = box, {}, time.monotonic()
        self.full_model = ""

    def say(self, name: str, value: Any) -> None:
        self.found[name] = value
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"[{time.monotonic() - self._began_s:5.0f} s] {name}: {shown}", flush=True)

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        done = work()
        self.say(f"{name}, s", time.monotonic() - began_s)
        return done

    def holders(self, when: str) -> None:
        """Who holds memory of the GPUs, in MB by the end of its command line; and what is taken in all."""
        if present().name != "cuda":
            return
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [
            {f"{one.pid} {_words(one.pid)}": round((one.usedGpuMemory or 0) / MB) for one in running}
            for running in map(pynvml.nvmlDeviceGetComputeRunningProcesses, handles)
        ]
        used = [round(pynvml.nvmlDeviceGetMemoryInfo(handle).used / MB) for handle in handles]
        pynvml.nvmlShutdown()
        self.say(f"on the GPUs {when}, MB", {"processes": found, "used": used})

    def start(self, model: str) -> None:
        self.holders("before anything")
        named = () if model == MODEL else ("--name", MODEL)
        if MODEL not in [known.id for known in self.box.client.models.list()]:
            self.timed("import", lambda: self.box.admin("model", "import", model, *named))
        answer = self.timed("first answer of a model that was never started", lambda: self._capital(MODEL))
        self.say("the answer", answer)
        self.timed("an answer of an engine that is awake", lambda: self._capital(MODEL))
        self.holders("with an engine")

    def train(self, name: str, file: str, hyperparameters: dict[str, Any]) -> str:
        client = self.box.client
        job = self.box.train(file, hyperparameters)
        began_s = time.monotonic()
        while (job := client.fine_tuning.jobs.retrieve(job.id)).status not in ("succeeded", "failed", "cancelled"):
            time.sleep(0.2)
            if self.found.get(f"{name}: to its first step, s") is None and _metrics(client, job.id, 1):
                self.say(f"{name}: to its first step, s", time.monotonic() - began_s)
                self.holders(f"while {name} trains")
        self.say(f"{name}: ended", f"{job.status} {job.error.message if job.error and job.error.message else ''}")
        self.say(f"{name}: whole, s", time.monotonic() - began_s)
        self._speed(name, job.id)
        self.holders(f"after {name}")
        self.say(f"{name}: answer", self.timed(f"{name}: first answer", lambda: self._capital(job.fine_tuned_model)))
        return job.fine_tuned_model

    def _speed(self, name: str, job_id: str) -> None:
        told = _metrics(self.box.client, job_id, 100)
        rates = [event.data["tokens_per_s"] for event in told if event.data.get("tokens_per_s")]
        if rates:
            self.say(f"{name}: tokens/s, median and most of {len(rates)}", [statistics.median(rates), max(rates)])
        losses = [round(event.data["train_loss"], 3) for event in reversed(told)]
        self.say(f"{name}: losses", losses[:: max(1, len(losses) // 8)])

    def full(self) -> None:
        self.full_model = self.train("full", self.box.upload("gsm8k_train.jsonl", 600), FULL)

    def swap(self, tuned: str) -> None:
        """Versions of a fully trained model change in place while streams flow."""
        newest = self.box.admin("model", "show", tuned)["active_version"]
        with Load(self.box.url, self.box.key, tuned, workers=4, max_tokens=64) as load:
            _wait(lambda: load.finished >= 8)
            for _ in range(3):
                self.box.admin("model", "rollback", tuned)
                self.box.admin("model", "rollback", tuned, "--version", newest)
            answered = load.finished
            _wait(lambda: load.finished >= answered + 8)
        self._report("swaps", load)
        self.holders("with two engines")

    def modes(self, tuned: str) -> None:
        job = self.box.train(self.box.upload("identity.jsonl"), HYPERPARAMETERS | {"n_epochs": 50})
        self.box.admin("mode", "set", "serve", "--wait")
        with Load(self.box.url, self.box.key, tuned) as load:
            _wait(lambda: load.finished >= 4)
            for turn in (1, 2):
                self.timed(f"mode train {turn}", lambda: self.box.admin("mode", "set", "train", "--wait"))
                time.sleep(2.0)
                self.holders(f"in mode train {turn}")
                self.timed(f"mode serve {turn}", lambda: self.box.admin("mode", "set", "serve", "--wait"))
                self.holders(f"in mode serve {turn}")
                answered = load.finished
                _wait(lambda answered=answered: load.finished >= answered + 4)
        self._report("modes", load)
        self._speed("LoRA, in pieces", job.id)
        try:
            self.box.client.fine_tuning.jobs.cancel(job.id)
        except openai.BadRequestError as ended:
            self.say("the background job", str(ended))
        self.box.admin("mode", "set", "auto", "--wait")

    def kill(self, model: str) -> None:
        """The engine's process dies; the next answer comes from one that found the compiled graphs on disk."""
        self._capital(model)
        engines = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if "EngineCore" in _words(pid)]
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        self.timed("an answer after kill -9 of every engine", lambda: self._capital(model))
        self.holders("after the kill")

    def methods(self, model: str) -> None:
        """A short job of each other method."""
        lines = [
            json.loads(line)["messages"] for line in (DEMO_DATA / "gsm8k_train.jsonl").read_text().split("\n")[:64]
        ]
        pairs = [
            {
                "input": {"messages": asked[:-1]},
                "preferred_output": asked[-1:],
                "non_preferred_output": [{"role": "assistant", "content": "I do not know."}],
            }
            for asked in lines
        ]
        dpo = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": 16}}}
        self._method("dpo", model, pairs, dpo)
        sums = [
            {"messages": [{"role": "user", "content": f"How many are {a} and {b}?"}], "answer": str(a + b)}
            for a in range(1, 5)
            for b in range(1, 9)
        ]
        right = {
            "type": "string_check",
            "name": "right",
            "operation": "like",
            "input": "{{ sample.output_text }}",
            "reference": "{{ item.answer }}",
        }
        given = {"n_epochs": 1, "batch_size": 8, "max_completion_tokens": 64}
        rewards = {"type": "reinforcement", "reinforcement": {"grader": right, "hyperparameters": given}}
        self._method("rewards", model, sums, rewards)

    def _method(self, name: str, model: str, rows: list[dict[str, Any]], method: dict[str, Any]) -> None:
        client = self.box.client
        text = "\n".join(map(json.dumps, rows)).encode()
        file = client.files.create(file=(f"{name}.jsonl", text), purpose="fine-tune")
        began_s = time.monotonic()
        job = client.fine_tuning.jobs.create(model=model, training_file=file.id, seed=7, suffix=name, method=method)
        while job.status not in ("succeeded", "failed", "cancelled"):
            time.sleep(0.2)
            job = client.fine_tuning.jobs.retrieve(job.id)
        self.say(f"{name}: ended", f"{job.status} {job.error.message if job.error and job.error.message else ''}")
        self.say(f"{name}: whole, s", time.monotonic() - began_s)
        self.say(f"{name}: steps", [event.data for event in reversed(_metrics(client, job.id, 100))])

    def steps(self) -> list[dict[str, Any]]:
        told = self.box.admin("mode", "history", "--limit", "1000")["data"]
        names = ("verb", "target", "state", "started_s", "ended_s", "detail")
        return [{name: step[name] for name in names} for handover in told for step in handover["steps"]]

    def _capital(self, model: str) -> str:
        return self.box.ask(model, "What is the capital of France?")

    def _report(self, name: str, load: Load) -> None:
        told = load.report()
        counts = {"answered": told.requests, "dropped": told.dropped, "truncated": told.truncated}
        self.say(name, {**counts, "duplicated": told.duplicated, "longest_s": round(told.longest_s, 2)})


def _metrics(client: openai.OpenAI, job_id: str, limit: int) -> list[Any]:
    told = client.fine_tuning.jobs.list_events(job_id, limit=100).data
    return [event for event in told if event.type == "metrics"][:limit]


def _words(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return words[-60:] or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _wait(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {timeout_s:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
