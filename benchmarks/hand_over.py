"""The two-way hand-over on a real box: 8 devices train, then serve, then train again, phase by phase.

    python benchmarks/hand_over.py [--sizes 5M 50M] [--rounds N]

A box of 8 logical devices in a directory of its own holds one model of random weights and one full fine-tuning job of
it (float32, ZeRO-1, a few tokens per step, so that a step is short). Each round sets the mode `serve` with a request
already waiting and takes the time to its first token; then sets the mode `train` and takes the time to the end of the
job's next step. The bytes are what the box records in its hand-over steps. They are compared with the sum of the same
copies at the rate of memcpy, measured in this run.

The step under way when the devices are asked for is left after a micro-batch and done again. The step that ends the
round is training, not hand-over: the whole is given until it is done, and until all ranks compute it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_most, record, stated  # noqa: E402 - the repository has to be on the path first
from benchmarks._models import SIZES  # noqa: E402
from tests.e2e.box_support import WholeBox, wait_for  # noqa: E402
from tests.e2e.engine_support import save_model  # noqa: E402

MODEL = "handed"
DEVICES = 8
AIM_S = 3.0
MEMCPY_BYTES = 256 * 2**20
POLL_S = 0.005
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 640


def memcpy_rate(threads: int) -> float:
    """Bytes per second of a warm copy with `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    source = torch.empty(MEMCPY_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(0)
    best = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began_s)
    return MEMCPY_BYTES / best


class Handed:
    """The box with its model and its job."""

    def __init__(self, box: WholeBox, size: str, folder: Path):
        self.box = box
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{box.port}", headers={"Authorization": f"Bearer {box.key}"}, timeout=300
        )
        save_model(folder / "model", seed=1, max_position_embeddings=256, **SIZES[size])
        box.run("model", "import", str(folder / "model"), "--name", MODEL)
        self.ask()
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        options = (
            f"--full --zero-stage 1 --epochs 50 --batch-size {DEVICES} --max-length 32 --min-devices {DEVICES} "
            "--set precision=fp32 --set packing=false --set snapshot_every_s=0"
        )
        self.job = box.submit(MODEL, folder / "rows.jsonl", options)
        self.events = box.data_dir / "jobs" / self.job / "events.jsonl"
        self.mode("train")
        wait_for(lambda: self.step() >= 3, "three training steps", timeout_s=300)

    def ask(self) -> float:
        """Seconds to the first token of a streamed answer."""
        began_s = time.perf_counter()
        body = {"model": MODEL, "prompt": "the", "max_tokens": 1, "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - began_s
        raise RuntimeError("the stream ended without a token")

    def mode(self, policy: str) -> None:
        """Set the mode; returns when the devices have moved."""
        self._http.put("/admin/v1/mode", json={"policy": policy}, params={"wait": True}).raise_for_status()

    def step(self) -> int:
        """The last step that the job has finished, from its own log."""
        if not self.events.exists():
            return 0
        steps = [json.loads(line) for line in self.events.read_text().splitlines() if '"metrics"' in line]
        return max((event["step"] for event in steps), default=0)

    def step_s(self) -> float:
        rows = [json.loads(line) for line in self.events.read_text().splitlines() if '"metrics"' in line]
        return statistics.median(row["tokens"] / row["tokens_per_s"] for row in rows)

    def newest(self) -> int:
        return max(int(handover["id"]) for handover in self.handovers())

    def handovers(self) -> list[dict[str, Any]]:
        answer = self._http.get("/admin/v1/handovers", params={"limit": 20}).raise_for_status()
        return answer.json()["data"]

    def steps_since(self, newest: int) -> list[dict[str, Any]]:
        return [
            step
            for handover in sorted(self.handovers(), key=lambda one: int(one["id"]))
            if int(handover["id"]) > newest
            for step in handover["steps"]
            if step["state"] == "done"
        ]

    def to_serving(self) -> dict[str, Any]:
        newest, first = self.newest(), {}
        asking = threading.Thread(target=lambda: first.update(seconds=self.ask()))
        began_s = time.time()
        asking.start()
        self.mode("serve")
        moved_s = time.time() - began_s
        asking.join()
        return {"seconds": first["seconds"], "moved_s": moved_s, **phases(self.steps_since(newest), began_s)}

    def to_training(self) -> dict[str, Any]:
        newest, before = self.newest(), self.step()
        began_s = time.time()
        setting = threading.Thread(target=self.mode, args=("train",))
        setting.start()
        while self.step() <= before:
            time.sleep(POLL_S)
        seconds = time.time() - began_s
        setting.join()
        return {"seconds": seconds, **phases(self.steps_since(newest), began_s)}


def phases(steps: list[dict[str, Any]], began_s: float) -> dict[str, Any]:
    """Per verb: when it began after the request, how long it took, the bytes it moved."""
    found = []
    for step in sorted(steps, key=lambda one: one["started_s"]):
        detail = step["detail"] or {}
        found.append(
            {
                "verb": step["verb"],
                "target": step["target"],
                "at_s": step["started_s"] - began_s,
                "seconds": step["ended_s"] - step["started_s"],
                "bytes": copied(step["verb"], detail),
                "detail": detail,
            }
        )
    return {"steps": found, "bytes": sum(step["bytes"] for step in found)}


def until_it_trains(one: dict[str, Any]) -> float:
    """Seconds of a round: until the first token, and then until all ranks train. The step that was left is not waited
    for; what is left out is the step after, which they then compute."""
    trains_s = max(step["at_s"] + step["seconds"] for step in one["to_training"]["steps"])
    return one["to_serving"]["seconds"] + trains_s


def copied(verb: str, detail: dict[str, Any]) -> int:
    if verb in ("wake_replica", "start_replica"):
        return sum(detail.get("bytes_read") or [])
    return int(detail.get("bytes") or 0)


def table(size: str, rounds: list[dict[str, Any]], rate: float, step_s: float) -> str:
    lines = [f"{size}: memcpy {rate / 1e9:.1f} GB/s, a training step {step_s * 1e3:.0f} ms"]
    for number, one in enumerate(rounds, 1):
        for way, what in (("to_serving", "train -> serve, first token"), ("to_training", "serve -> train, next step")):
            lines.append(f"round {number}: {what} {one[way]['seconds']:.2f} s")
            for step in one[way]["steps"]:
                size_text = f"{step['bytes'] / 1e6:8.1f} MB" if step["bytes"] else " " * 11
                inner = step["detail"].get("seconds")
                told = {name: round(value, 3) for name, value in inner.items()} if isinstance(inner, dict) else ""
                took = f"at {step['at_s']:5.2f} s  took {step['seconds']:6.3f} s"
                lines.append(f"    {step['verb']:14} {took} {size_text}  {told}")
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "50M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(size, options.rounds) for size in options.sizes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(size: str, count: int) -> dict[str, Any]:
    """Rounds on a box of their own; prints and records what they took."""
    rate = memcpy_rate(min(DEVICES, os.cpu_count() or 1))
    folder = Path(tempfile.mkdtemp(prefix="hand-over-"))
    box = WholeBox(folder / "box")
    try:
        box.up()
        handed = Handed(box, size, folder)
        rounds = [{"to_serving": handed.to_serving(), "to_training": handed.to_training()} for _ in range(count)]
        step_s = handed.step_s()
        box.run("down")
    finally:
        box.destroy()
        shutil.rmtree(folder, ignore_errors=True)
    print(table(size, rounds, rate, step_s))
    whole_s = statistics.median(one["to_serving"]["seconds"] + one["to_training"]["seconds"] for one in rounds)
    moved = statistics.median(one["to_serving"]["bytes"] + one["to_training"]["bytes"] for one in rounds)
    moving_s = statistics.median(map(until_it_trains, rounds))
    copies_s = moved / rate
    print(
        f"to the first token and until the next step is done {whole_s:.2f} s, of it a training step of {step_s:.2f} s; "
        f"to the first token and until all ranks train {moving_s:.2f} s = "
        f"{moving_s / copies_s:.1f} x its copies ({moved / 1e6:.0f} MB, {copies_s * 1e3:.0f} ms at memcpy rate)",
        flush=True,
    )
    record(
        __file__,
        [
            at_most("two-way hand-over: first token, and all ranks train", size, moving_s, "s", AIM_S),
            at_most("two-way hand-over: first token, and the next step done", size, whole_s, "s", AIM_S),
            stated("two-way hand-over over the sum of its copies", size, moving_s / copies_s, "x memcpy"),
        ],
    )
    return {"size": size, "memcpy_bytes_per_s": rate, "step_s": step_s, "rounds": rounds}


if __name__ == "__main__":
    main()
