"""GRPO by TRL and by a box: the same model, prompts, rewards, settings and cores, and how soon the reward is there.

    python benchmarks/grpo_trl.py --trl PYTHON [--steps N] [--prompts N] [--tokens N] [--ways WAY ...] [--seeds N ...]

PYTHON: an interpreter of an environment with TRL, transformers and peft. A starter, LoRA of rank 8, sums, eight answers
of each prompt in a step. A way is `ranks` (two ranks sample and learn), `engine-N` (an engine samples, one rank learns,
for a staleness of N) or `trl` (its GRPOTrainer, transformers' `generate`, two threads). All have two cores. TRL runs
when the box is down. Seconds count from the first step's begin, so that neither the start of a box nor imports do.
Prints for each way what a step takes, the mean reward by step, and the seconds until the mean of four steps has passed
each of some rewards; load averages of the machine before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import record, stated  # noqa: E402 - the path comes first
from tests.e2e.box_support import WholeBox, wait_for, whole_box  # noqa: E402
from tests.e2e.test_box_rewards import GRADER, steps_of, sums  # noqa: E402

GROUP, RANK, RATE, THREADS = 8, 8, 0.003, 2
REACHED = (0.1, 0.2, 0.3, 0.4)
MEAN_OF = 4
Curve = list[tuple[float, float]]
"""(seconds since the first step began, mean reward) at the end of each step."""


def by_the_box(box: WholeBox, way: str, asked: argparse.Namespace, seed: int) -> Curve:
    who, _, staleness = way.partition("-")
    box.run("mode", "set", *(["split", "--train", "1"] if staleness else ["train"]), "--wait")
    client = box.client(max_retries=5)
    hyperparameters: dict[str, Any] = {
        "n_epochs": 1,
        "batch_size": asked.prompts,
        "max_completion_tokens": asked.tokens,
        "general_questions": False,
        "learning_rate": RATE,
        "lora_rank": RANK,
        "rollouts": who,
    }
    if staleness:
        hyperparameters["staleness"] = int(staleness)
    made = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, asked.steps * asked.prompts)),
        seed=seed,
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},  # type: ignore[typeddict-item]
    )
    box.run("job", "wait", made.id, "--timeout", "1800", timeout_s=1900)
    steps = steps_of(client, made.id)
    assert steps.keys() == set(range(1, asked.steps + 1)), f"{way}: steps {sorted(steps)}"
    ordered = [steps[step] for step in sorted(steps)]
    took_s = accumulate(one["timing"]["step"]["full_iteration"] for one in ordered)
    return list(zip(took_s, (one["train_mean_reward"] for one in ordered), strict=True))


def by_trl(model: Path, asked: argparse.Namespace, seed: int) -> Curve:
    rows = []
    for line in sums(1, asked.steps * asked.prompts).splitlines():
        row = json.loads(line)
        rows.append({"prompt": row["messages"], "answer": row["answer"]})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        wanted = {
            "model": str(model),
            "rows": rows,
            "steps": asked.steps,
            "prompts": asked.prompts,
            "tokens": asked.tokens,
            "group": GROUP,
            "rank": RANK,
            "rate": RATE,
            "threads": THREADS,
            "seed": seed,
            "out": str(out),
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        script = [asked.trl, str(Path(__file__).with_name("_grpo_by_trl.py"))]
        done = subprocess.run(script, input=json.dumps(wanted), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return [(seconds, reward) for seconds, reward in json.loads(out.read_text())]


def reached(curve: Curve, reward: float) -> float | None:
    """Seconds until the mean of the last steps is this; None: never."""
    for place in range(MEAN_OF, len(curve) + 1):
        if statistics.mean(one for _, one in curve[place - MEAN_OF : place]) >= reward:
            return curve[place - 1][0]
    return None


def told(way: str, seed: int, curve: Curve) -> None:
    ends = [0.0, *(seconds for seconds, _ in curve)]
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    print(f"{way}, seed {seed}: median step {statistics.median(steps[2:]):.2f} s, {curve[-1][0]:.0f} s in all")
    print("  reward by step", " ".join(f"{reward:.2f}" for _, reward in curve))
    times = ((reward, reached(curve, reward)) for reward in REACHED)
    print("  seconds until", ", ".join(f"{r}: {'never' if s is None else f'{s:.1f}'}" for r, s in times), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trl", required=True, metavar="PYTHON")
    options.add_argument("--ways", nargs="+", default=["ranks", "engine-1", "trl"])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--seeds", type=int, nargs="+", default=[5])
    asked = options.parse_args()
    print(f"load before {os.getloadavg()}", flush=True)
    found: dict[tuple[str, int], Curve] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "starter"
        with whole_box(Path(folder), "[box]\ndevices = 2\n") as box:
            assert box.ask("model", "starter", "--minutes", "0.05")["state"] == "succeeded"
            kept = box.data_dir / "models" / "starter"
            (version,) = wait_for(lambda: kept.is_dir() and list(kept.iterdir()), "the starter on disk", 60)
            shutil.copytree(version, model)
            for seed in asked.seeds:
                for way in asked.ways:
                    if way != "trl":
                        found[way, seed] = by_the_box(box, way, asked, seed)
                        told(way, seed, found[way, seed])
        for seed in asked.seeds:
            if "trl" in asked.ways:
                found["trl", seed] = by_trl(model, asked, seed)
                told("trl", seed, found["trl", seed])
    print(f"load after {os.getloadavg()}, {time.strftime('%Y-%m-%d')}")
    size = f"starter, {asked.prompts} prompts, {asked.tokens} tokens"
    rows = []
    for (way, seed), curve in found.items():
        rows.append(stated(f"GRPO by {way}, seed {seed}: a step", size, curve[-1][0] / len(curve), "s"))
        for reward in REACHED:
            if (seconds := reached(curve, reward)) is not None:
                rows.append(stated(f"GRPO by {way}, seed {seed}: until {reward}", size, seconds, "s"))
    record(__file__, rows)


if __name__ == "__main__":
    main()
