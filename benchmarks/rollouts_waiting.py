"""What staleness hides of a step, where ranks, engine and grader each have a machine of their own: here they wait.

    python benchmarks/rollouts_waiting.py [--steps N] [--answer S] [--spread F] [--learn S] [--grade S] [--json FILE]

One rank of a tiny model with LoRA, as a box runs it, in this process. The engine, the grader and most of the
update are waits, so that two cores shared with others measure as a machine for each would: an engine writes the
answers of one step after the other in `--answer` seconds, more or less by up to `--spread` of it, the same for all
ways; a grader takes `--grade` seconds; an update `--learn` seconds and what the tiny model takes. Prints for each
staleness, and for 2 in flight, the seconds of a step, the share of it in which the rank waits, and that in which it
writes the model for engines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402 - the path comes first

from benchmarks._claims import at_least, at_most, record, stated  # noqa: E402
from tests.train_support.tiny import make_model_dir, write_prompt_file  # noqa: E402
from tests.train_support.world import SAMPLES  # noqa: E402
from train.control.progress import ControlSignals, Progress  # noqa: E402
from train.plan.spec import TrainSpec  # noqa: E402
from train.trainer.engine import init_world, meeting_url  # noqa: E402
from train.trainer.prepare import prepare  # noqa: E402

WARMING, PROMPTS, TOKENS = 3, 2, 16
WAYS = {"engine-0": (0, False), "engine-1": (1, False), "engine-2": (2, False), "flight-2": (2, True)}
AIMS = {"engine-1": 1.4, "flight-2": 2.0}
"""Times the throughput of engine-0."""


class Waiting:
    """Whoever runs the job, its engine and its grader, each a thread that takes its time."""

    def __init__(self, answers_s: list[float], grade_s: float):
        self.signals, self.steps, self.ended_s = ControlSignals(), list[dict[str, Any]](), list[float]()
        self._answers_s, self._grade_s = iter(answers_s), grade_s
        self._newest: list[tuple[float, str]] = []
        self._asked: dict[str, Queue] = {"sample": Queue(), "grade": Queue()}
        for kind, answer in (("sample", self._sample), ("grade", self._grade)):
            threading.Thread(target=self._serve, args=(self._asked[kind], answer), daemon=True).start()

    def __call__(self, event: str, **data: Any) -> None:
        if event == "metrics":
            self.steps.append(data)
            self.ended_s.append(time.monotonic())
        elif event == "ask":
            if data["kind"] == "sample":
                self._newest.append((time.monotonic(), data["policy"]["version"]))
            self._asked[data["kind"]].put(data)

    def _serve(self, asked: Queue, answer: Any) -> None:
        known = set[str]()
        while True:
            data = asked.get()
            if data["question"] not in known:
                known.add(data["question"])
                self.signals.answer(data["question"], answer(data))

    def _sample(self, data: dict[str, Any]) -> dict[str, Any]:
        began_s = time.monotonic()
        time.sleep(next(self._answers_s))
        spans = [[data["policy"]["version"], TOKENS]]
        if data["in_flight"]:  # what was asked about by the time of each token
            at = [began_s + (time.monotonic() - began_s) * (token + 0.5) / TOKENS for token in range(TOKENS)]
            writers = [[version for asked_s, version in self._newest if asked_s <= one][-1] for one in at]
            spans = [[version, writers.count(version)] for version in dict.fromkeys(writers)]
        samples = [
            {"place": place, "ids": [[67 + place % 2] * TOKENS], "log_probs": [[-6.0] * TOKENS], "spans": [spans]}
            for prompt in data["prompts"]
            for place in range(prompt["place"], prompt["place"] + prompt["n"])
        ]
        return {"samples": samples, "why": ""}

    def _grade(self, data: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self._grade_s)
        return {
            "rewards": [one["text"].count("a") / TOKENS for one in data["samples"]],
            "errors": [""] * len(data["samples"]),
        }


def run(folder: Path, way: str, asked: argparse.Namespace) -> dict[str, Any]:
    staleness, in_flight = WAYS[way]
    spec = TrainSpec(
        job_id=way,
        base_path=str(folder / "base"),
        train_path=str(folder / "train.jsonl"),
        run_dir=str(folder / way),
        shm_root=str(folder / way / "store"),
        output_model="m",
        method="reinforcement",
        options={**SAMPLES, "rollouts": "engine", "staleness": staleness, "in_flight": in_flight},
        batch_size=PROMPTS,
        max_length=96,
        packing=False,
        learning_rate=1e-4,
        warmup_ratio=0.0,
        precision="fp32",
        full=False,
        lora_rank=4,
        lora_publish="adapter",
        base_model="base",
        base_version="v1",
        device_kind="cpu",
    )
    draw = np.random.default_rng(1)
    answers_s = asked.answer * draw.uniform(1 - asked.spread, 1 + asked.spread, asked.steps)
    box = Waiting(answers_s.tolist(), asked.grade)
    made = prepare(spec, box, box.signals, Progress(), None)
    update = made.engine.step

    def learn() -> None:
        # Its last micro-batch alone updates.
        if made.engine.is_gradient_accumulation_boundary():
            time.sleep(asked.learn)
        update()

    made.engine.step = learn
    assert made.run()["outcome"] == "succeeded"
    made.close()
    later = box.steps[WARMING:]
    took_s = (box.ended_s[-1] - box.ended_s[WARMING - 1]) / len(later)
    timed = [step["timing"]["step"] for step in later]
    return {
        "step_s": took_s,
        "waits": statistics.mean(one["sampling"] + one["grading"] for one in timed) / took_s,
        "publishing": statistics.mean(one["publishing"] for one in timed) / took_s,
        "training_s": statistics.mean(one["training"] for one in timed),
        "staleness_mean": statistics.mean(step["staleness_mean"] for step in later),
        "staleness_max": max(step["staleness_max"] for step in box.steps),
        "engine_samples": statistics.mean(step["engine_samples"] for step in box.steps),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--answer", type=float, default=2.0)
    options.add_argument("--spread", type=float, default=0.3)
    options.add_argument("--learn", type=float, default=2.0)
    options.add_argument("--grade", type=float, default=0.3)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_dir(folder / "base", dtype=torch.float32)
        write_prompt_file(folder / "train.jsonl", PROMPTS * asked.steps)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
        init_world("cpu", meeting_url(folder / "meeting"), 30.0)
        for way in WAYS:
            found[way] = run(folder, way, asked)
    size = f"answers {asked.answer:g} s, update {asked.learn:g} s, grader {asked.grade:g} s"
    rows = []
    for way, one in found.items():
        gain = found["engine-0"]["step_s"] / one["step_s"]
        print(
            f"{way:9} step {one['step_s']:.2f} s (training {one['training_s']:.2f})  {gain:.2f} x  the rank waits "
            f"{one['waits']:.1%}, writes the model {one['publishing']:.1%}  staleness mean {one['staleness_mean']:.2f} "
            f"max {one['staleness_max']}, by the engine {one['engine_samples']:.2f}"
        )
        rows.append(stated(f"step that waits, {way}", size, one["step_s"], "s"))
        rows.append(at_most(f"step that waits, {way}: writing the model", size, one["publishing"], "share", 0.05))
        if way in AIMS:
            rows.append(at_least(f"step that waits, {way} by engine-0", size, gain, "x", AIMS[way]))
            rows.append(at_most(f"step that waits, {way}: the rank waits", size, one["waits"], "share", 0.1))
    record(__file__, rows)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
