"""Measures the hand-over on a real box in both directions, phase by phase: 8 devices train, serve, and train again.

    python -m benchmarks.hand_over [--sizes 5M 50M] [--rounds N]

The box has one model of random weights and one full fine-tuning job of it (float32, ZeRO-1, a few tokens per step, so
that a step is short). Each round sets the mode `serve` with a request already waiting, and times its first token. Then
it sets the mode `train`, and times when all ranks train and when the job's next step ends. Repeating an aborted step
counts as training, not as hand-over.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from benchmarks._claims import at_most, parser, record
from benchmarks._machine import SIZES
from tests.e2e.box_support import WholeBox, wait_for, whole_box
from tests.e2e.engine_support import save_model

MODEL = "handed"
DEVICES = 8
AIM_S = 3.0
ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 640


class Handed:
    """Holds a box with one model and one job."""

    def __init__(self, box: WholeBox, size: str, folder: Path):
        self.box = box
        self._http = httpx.Client(base_url=box.url, headers={"Authorization": f"Bearer {box.key}"}, timeout=300)
        save_model(folder / "model", seed=1, max_position_embeddings=256, **SIZES[size])
        box.run("model", "import", str(folder / "model"), "--name", MODEL)
        self.ask()
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        options = (
            f"--full --zero-stage 1 --epochs 50 --batch-size {DEVICES} --max-length 32 --min-devices {DEVICES} "
            "--set precision=fp32 --set packing=false --set snapshot_every_s=0"
        )
        self._job_id = box.submit(MODEL, folder / "rows.jsonl", options)
        box.set_mode(policy="train")
        wait_for(lambda: self.step() >= 3, "three training steps", timeout_s=300)

    def ask(self) -> float:
        """Return the seconds to the first token of a streamed answer."""
        began_s = time.perf_counter()
        body = {"model": MODEL, "prompt": "the", "max_tokens": 1, "stream": True}
        with self._http.stream("POST", "completions", json=body) as answer:
            next(line for line in answer.raise_for_status().iter_lines() if line.startswith("data: {"))
            return time.perf_counter() - began_s

    def step(self) -> int:
        """Return the job's last finished step, read from the database, because a request would take the box's time."""
        with closing(sqlite3.connect(self.box.data_dir / "appliance.db")) as db:
            newest = db.execute("SELECT max(step) FROM job_metrics WHERE job_id = ?", [self._job_id]).fetchone()[0]
        return newest or 0

    def steps_since(self, began_s: float) -> list[dict[str, Any]]:
        """Return the completed hand-over steps that began at this time or later, in order of their start."""
        found = [step for one in self.box.admin("handovers?limit=20")["data"] for step in one["steps"]]
        done = [step for step in found if step["state"] == "done" and step["started_s"] >= began_s]
        return sorted(done, key=lambda step: step["started_s"])

    def round(self, number: int) -> tuple[float, float]:
        """Return two sums of seconds: first token and all ranks training; first token and the end of the next step."""
        first: list[float] = []
        asking = threading.Thread(target=lambda: first.append(self.ask()))
        began_s = time.time()
        asking.start()
        self.box.set_mode(policy="serve")
        asking.join()
        self._show(f"round {number}: train to serve, first token {first[0]:.2f} s", began_s)
        began_s, before = time.time(), self.step()
        setting = threading.Thread(target=self.box.set_mode, kwargs={"policy": "train"})
        setting.start()
        wait_for(lambda: self.step() > before, "the next step", pause_s=0.005)
        stepped_s = time.time() - began_s
        setting.join()
        steps = self._show(f"round {number}: serve to train, next step {stepped_s:.2f} s", began_s)
        return first[0] + max(step["ended_s"] for step in steps) - began_s, first[0] + stepped_s

    def _show(self, title: str, began_s: float) -> list[dict[str, Any]]:
        print(title)
        steps = self.steps_since(began_s)
        for step in steps:
            at_s, took_s = step["started_s"] - began_s, step["ended_s"] - step["started_s"]
            print(f"    {step['verb']:14} at {at_s:5.2f} s, took {took_s:6.3f} s  {step['detail']}", flush=True)
        return steps


def measure(size: str, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hand-over-") as folder:
        data_dir = Path(folder) / "box"
        data_dir.mkdir()
        with whole_box(data_dir) as box:
            handed = Handed(box, size, Path(folder))
            rounds = [handed.round(number) for number in range(1, count + 1)]
    moving_s, whole_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    record(
        __file__,
        [
            at_most("two-way hand-over: first token, and all ranks train", size, moving_s, "s", AIM_S),
            at_most("two-way hand-over: first token, and the next step done", size, whole_s, "s", AIM_S),
        ],
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "50M"])
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    for size in given.sizes:
        measure(size, given.rounds)


if __name__ == "__main__":
    main()
