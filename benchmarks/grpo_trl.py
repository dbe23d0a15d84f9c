"""Compares GRPO by TRL and by a box with the same model, prompts, rewards, settings and cores: seconds until a reward
is reached.

    python -m benchmarks.grpo_trl [--steps N] [--prompts N] [--tokens N] [--ways WAY ...] [--seeds N ...]

Setup: the starter, LoRA of rank 8, sums, eight answers per prompt and step. A WAY is `train` (mode train: an engine and
ranks on all other devices), `engine-N` (an engine and one rank, with staleness N) or `trl` (GRPOTrainer with
transformers' `generate`). TRL runs after the box has stopped. Seconds count from the start of the first step, without
imports and the start of a box. Results per way: wall and CPU seconds of a step (summed over the box), the mean reward
by step, and seconds and answer tokens until the mean of four steps reaches certain rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from benchmarks._claims import parser, record, stated
from benchmarks._trl import grpo, in_new_process, install
from tests.e2e.box_support import WholeBox, starter_folder, wait_for, whole_box
from tests.e2e.test_box_rewards import GRADER, steps_of, sums

GROUP, RANK, RATE = 8, 8, 0.003
REACHED = (0.5, 0.6, 0.7)
MEAN_OF = 4
STARTER_STEPS = 10


@dataclass(frozen=True)
class Curve:
    """Values by step. ended_s: seconds from the start of the first step to the end of the step. rewards: mean rewards.
    lengths: mean tokens per answer. cpu_s: CPU seconds per step, without the first step."""

    ended_s: tuple[float, ...]
    rewards: tuple[float, ...]
    lengths: tuple[float, ...]
    cpu_s: float


def cpu_of(box: WholeBox) -> float:
    """Return the CPU seconds of a box's processes and of their ended children."""
    spent_s = 0.0
    for pid in [*box.running(), box.main_pid()]:
        try:
            spent_s += sum(psutil.Process(pid).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return spent_s


def by_the_box(box: WholeBox, way: str, given: argparse.Namespace, seed: int) -> Curve:
    staleness = way.partition("-")[2]
    box.set_mode(**({"policy": "split", "train_devices": 1} if staleness else {"policy": "train"}))
    client = box.client(max_retries=5)
    hyperparameters: dict[str, Any] = {
        "n_epochs": 1,
        "batch_size": given.prompts,
        "max_completion_tokens": given.tokens,
        "learning_rate": RATE,
        "lora_rank": RANK,
        "staleness": int(staleness or 0),
    }
    job = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, given.steps * given.prompts)),
        seed=seed,
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},  # type: ignore[typeddict-item]
    )
    done = wait_for(lambda: max((row["step"] for row in box.steps(job.id)), default=0), "the first step", 600)
    before_s = cpu_of(box)
    box.run("job", "wait", job.id, "--timeout", "1800", timeout_s=1900)
    cpu_s = (cpu_of(box) - before_s) / (given.steps - done)
    steps = steps_of(client, job.id)
    ordered = [steps[step] for step in sorted(steps)]
    ended_s = accumulate(one["timing"]["step"]["full_iteration"] for one in ordered)
    columns = (tuple(one[name] for one in ordered) for name in ("train_mean_reward", "completion_tokens_mean"))
    return Curve(tuple(ended_s), *columns, cpu_s)


def by_trl(given: argparse.Namespace, seed: int) -> Curve:
    lines = map(json.loads, sums(1, given.steps * given.prompts).splitlines())
    rows = [{"prompt": line["messages"], "answer": line["answer"]} for line in lines]
    model, sizes = str(starter_folder(STARTER_STEPS)), (given.steps, given.prompts, given.tokens, GROUP, RANK)
    # On shared cores, additional threads only wait for each other.
    found = in_new_process(grpo, model, rows, *sizes, RATE, seed, threads=1)
    ended_s, rewards, lengths, cpu_s = zip(*found, strict=True)
    return Curve(ended_s, rewards, lengths, (cpu_s[-1] - cpu_s[0]) / (len(cpu_s) - 1))


def report(way: str, seed: int, curve: Curve, given: argparse.Namespace) -> None:
    print(f"{way}, seed {seed}: reward by step", " ".join(f"{reward:.2f}" for reward in curve.rewards))
    of, size = f"GRPO by {way}, seed {seed}", f"starter, {given.prompts} prompts, {given.tokens} tokens"
    tokens = list(accumulate(length * GROUP * given.prompts for length in curve.lengths))
    rows = [
        stated(f"{of}: a step", size, curve.ended_s[-1] / len(curve.ended_s), "s"),
        stated(f"{of}: CPU of a step", size, curve.cpu_s, "s"),
    ]
    means = [statistics.mean(curve.rewards[end - MEAN_OF : end]) for end in range(MEAN_OF, len(curve.rewards) + 1)]
    for reward in REACHED:
        if (step := next((n for n, mean in enumerate(means, MEAN_OF - 1) if mean >= reward), None)) is not None:
            rows.append(stated(f"{of}: until {reward}", size, curve.ended_s[step], "s"))
            rows.append(stated(f"{of}: tokens until {reward}", size, tokens[step], "tokens"))
    record(__file__, rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ways", nargs="+", default=["train", "engine-1", "trl"])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--seeds", type=int, nargs="+", default=[5])
    given = options.parse_args()
    ways = [way for way in given.ways if way != "trl"]
    if ways:
        with tempfile.TemporaryDirectory() as folder, whole_box(Path(folder), "[box]\ndevices = 2\n") as box:
            box.make_starter(STARTER_STEPS)
            for seed in given.seeds:
                for way in ways:
                    report(way, seed, by_the_box(box, way, given, seed), given)
    if "trl" in given.ways:
        install()
        for seed in given.seeds:
            report("trl", seed, by_trl(given, seed), given)


if __name__ == "__main__":
    main()
