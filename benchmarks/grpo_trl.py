"""GRPO by TRL and by a box: the same model, prompts, rewards, settings and cores, and how soon the reward is there.

    python benchmarks/grpo_trl.py [--steps N] [--prompts N] [--tokens N] [--ways WAY ...] [--seeds N ...]
                                  [--trl-threads N] [--starter DIRECTORY] [--json FILE]

TRL is no dependency of the box: it is installed under build/peers at the first run. A starter (of DIRECTORY, which is
made where it is not there, so that several runs have the same), LoRA of rank 8, sums, eight answers of each prompt in a
step. A way is `train` (the mode: an engine beside as many ranks as there are devices for), `engine-N` (beside one rank,
for a staleness of N) or `trl` (its GRPOTrainer, transformers' `generate`). TRL runs when the box is down. Seconds count
from the first step's begin, so that neither the start of a box nor imports do. Prints for each way what a step takes,
in seconds of the clock and of CPU (of the whole box), the mean reward by step, and the seconds and the tokens of
answers until the mean of four steps has passed each of some rewards; load averages of the machine before and after.
What FILE has of other ways and seeds stays in it.
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
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import _peers  # noqa: E402 - the path comes first
from benchmarks._claims import record, stated  # noqa: E402
from benchmarks._processor_time import cpu_of  # noqa: E402
from tests.e2e.box_support import WholeBox, wait_for, whole_box  # noqa: E402
from tests.e2e.test_box_rewards import GRADER, steps_of, sums  # noqa: E402

GROUP, RANK, RATE = 8, 8, 0.003
REACHED = (0.5, 0.6, 0.7)
MEAN_OF = 4


@dataclass(frozen=True)
class Curve:
    """At the end of each step: seconds since the first one began, mean reward, tokens of answers until then. cpu_s: of
    a step but the first."""

    ended_s: list[float]
    rewards: list[float]
    tokens: list[float]
    cpu_s: float


def by_the_box(box: WholeBox, way: str, asked: argparse.Namespace, seed: int) -> Curve:
    staleness = way.partition("-")[2]
    box.run("mode", "set", *(["split", "--train", "1"] if staleness else ["train"]), "--wait")
    client = box.client(max_retries=5)
    hyperparameters: dict[str, Any] = {
        "n_epochs": 1,
        "batch_size": asked.prompts,
        "max_completion_tokens": asked.tokens,
        "learning_rate": RATE,
        "lora_rank": RANK,
        "staleness": int(staleness or 0),
    }
    made = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, asked.steps * asked.prompts)),
        seed=seed,
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},  # type: ignore[typeddict-item]
    )
    done = wait_for(lambda: max((row["step"] for row in box.steps(made.id)), default=0), "the first step", 600)
    before_s = cpu_of(box)
    box.run("job", "wait", made.id, "--timeout", "1800", timeout_s=1900)
    cpu_s = (cpu_of(box) - before_s) / (asked.steps - done)
    steps = steps_of(client, made.id)
    assert steps.keys() == set(range(1, asked.steps + 1)), f"{way}: steps {sorted(steps)}"
    ordered = [steps[step] for step in sorted(steps)]
    timed = [one["timing"]["step"] for one in ordered[2:]]
    parts = {part: round(statistics.median(one.get(part, 0.0) for one in timed), 2) for part in timed[0]}
    print(f"{way}, seed {seed}: medians {parts}")
    return Curve(
        list(accumulate(one["timing"]["step"]["full_iteration"] for one in ordered)),
        [one["train_mean_reward"] for one in ordered],
        list(accumulate(one["completion_tokens_mean"] * GROUP * asked.prompts for one in ordered)),
        cpu_s,
    )


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
            "threads": asked.trl_threads,
            "seed": seed,
            "out": str(out),
        }
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(asked.trl_threads),
            "PYTHONPATH": str(_peers.path("trl")),
        }
        script = [sys.executable, str(Path(__file__).with_name("_grpo_by_trl.py"))]
        done = subprocess.run(script, input=json.dumps(wanted), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-6000:]
        ended_s, rewards, lengths, cpu_s = zip(*json.loads(out.read_text()), strict=True)
        tokens = list(accumulate(length * GROUP * asked.prompts for length in lengths))
        return Curve(list(ended_s), list(rewards), tokens, (cpu_s[-1] - cpu_s[0]) / (len(cpu_s) - 1))


def reached(curve: Curve, reward: float) -> int | None:
    """The step at which the mean of the last ones is this, from 0; None: never."""
    for place in range(MEAN_OF, len(curve.rewards) + 1):
        if statistics.mean(curve.rewards[place - MEAN_OF : place]) >= reward:
            return place - 1
    return None


def told(way: str, seed: int, curve: Curve) -> None:
    ends = [0.0, *curve.ended_s]
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    print(
        f"{way}, seed {seed}: median step {statistics.median(steps[2:]):.2f} s, {curve.cpu_s:.2f} s of CPU; "
        f"{ends[-1]:.0f} s and {curve.tokens[-1]:.0f} tokens in all"
    )
    print("  reward by step", " ".join(f"{reward:.2f}" for reward in curve.rewards))
    for reward in REACHED:
        if (step := reached(curve, reward)) is not None:
            print(f"  {reward} after {step + 1} steps, {curve.ended_s[step]:.1f} s, {curve.tokens[step]:.0f} tokens")
    sys.stdout.flush()


def in_a_box(folder: Path, model: Path, asked: argparse.Namespace, found: dict[str, Curve]) -> None:
    """All ways but TRL's, into found; before them the model, if it is not there."""
    with whole_box(folder, "[box]\ndevices = 2\n") as box:
        if model.exists():
            box.run("model", "import", str(model), "--name", "starter", timeout_s=600)
        else:
            box.make_starter()
            kept = box.data_dir / "models" / "starter"
            (version,) = wait_for(lambda: kept.is_dir() and list(kept.iterdir()), "the starter on disk", 60)
            shutil.copytree(version, model)
        for seed in asked.seeds:
            for way in asked.ways:
                if way != "trl":
                    found[f"{way} {seed}"] = by_the_box(box, way, asked, seed)
                    told(way, seed, found[f"{way} {seed}"])
                    keep(asked.json, found)


def keep(file: Path | None, found: dict[str, Curve]) -> None:
    if file:
        file.write_text(json.dumps({name: asdict(curve) for name, curve in found.items()}, indent=1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trl-threads", type=int, default=1, help="more wait for each other where cores are shared")
    options.add_argument("--ways", nargs="+", default=["train", "engine-1", "trl"])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--seeds", type=int, nargs="+", default=[5])
    options.add_argument("--starter", type=Path)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    print(f"load before {os.getloadavg()}", flush=True)
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    found = {name: Curve(**one) for name, one in kept.items()}
    with tempfile.TemporaryDirectory() as folder:
        model = asked.starter or Path(folder) / "starter"
        if not model.exists() or [*asked.ways] != ["trl"]:
            in_a_box(Path(folder), model, asked, found)
        for seed in asked.seeds:
            if "trl" in asked.ways:
                found[f"trl {seed}"] = by_trl(model, asked, seed)
                told("trl", seed, found[f"trl {seed}"])
                keep(asked.json, found)
    print(f"load after {os.getloadavg()}, {time.strftime('%Y-%m-%d')}")
    size = f"starter, {asked.prompts} prompts, {asked.tokens} tokens"
    rows = []
    for name, curve in found.items():
        of = "GRPO by {}, seed {}".format(*name.split())
        rows.append(stated(f"{of}: a step", size, curve.ended_s[-1] / len(curve.ended_s), "s"))
        rows.append(stated(f"{of}: CPU of a step", size, curve.cpu_s, "s"))
        for reward in REACHED:
            if (step := reached(curve, reward)) is not None:
                rows.append(stated(f"{of}: until {reward}", size, curve.ended_s[step], "s"))
                rows.append(stated(f"{of}: tokens until {reward}", size, curve.tokens[step], "tokens"))
    record(__file__, rows)


if __name__ == "__main__":
    main()
