"""Rewards with a model of any size: the mean reward of prompts held out, before and after, by seed.

    python benchmarks/rewards.py [--model DIRECTORY] [--seeds N ...] [--steps N] [--rate R] [--json FILE]

Two CPU devices in mode `train`: two ranks sample and learn. Sums in words ("How many apples are 12 apples and 5
apples? Answer with a number."), 0.8 of the reward for the share of digits in the answer and 0.2 for the right number;
LoRA of rank 16, two prompts of eight answers in a step. Twelve prompts are held out, of numbers that are not trained
on, with four answers each. Without a model a starter is made. What FILE has of other seeds stays in it and counts in
the means, so that seeds can be run one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_least, record, stated  # noqa: E402 - the path comes first
from tests.e2e.box_support import WholeBox, whole_box  # noqa: E402
from tests.e2e.test_box_rewards import GRADER, asked, steps_of, sums, told_of  # noqa: E402

HELD_OUT, FIRST_HELD_OUT, PROMPTS = 12, 500, 2
VALIDATIONS = 4


def run(box: WholeBox, model: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    client, began_s = box.client(max_retries=5), time.monotonic()
    hyperparameters = {
        "n_epochs": 1,
        "batch_size": PROMPTS,
        "max_completion_tokens": options.tokens,
        "eval_samples": 4,
        "eval_interval": max(1, options.steps // VALIDATIONS),
        "lora_rank": 16,
        "learning_rate": options.rate,
    }
    box.set_mode(policy="train")
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=box.upload(sums(1, PROMPTS * options.steps)),
        validation_file=box.upload(sums(FIRST_HELD_OUT, HELD_OUT), "held-out.jsonl"),
        seed=seed,
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}},
    )
    box.run("job", "wait", job.id, "--timeout", "3600", timeout_s=3700)
    box.set_mode(policy="serve")
    done, steps = client.fine_tuning.jobs.retrieve(job.id), steps_of(client, job.id)
    validations = told_of(client, job.id, "valid_mean_reward")
    held_out, error = (
        {data["step"]: data[name] for data in validations} for name in ("valid_mean_reward", "valid_mean_reward_error")
    )
    timed = [data["timing"]["step"] for data in steps.values()]
    parts = {part: round(statistics.median(one.get(part, 0.0) for one in timed), 2) for part in timed[0]}
    print(f"seed {seed}: {done.status} in {time.monotonic() - began_s:.0f} s, a step {parts}")
    for name, rows in (
        ("reward of the step", {step: data["train_mean_reward"] for step, data in steps.items()}),
        ("tokens of an answer", {step: data["completion_tokens_mean"] for step, data in steps.items()}),
        ("reward held out", held_out),
        ("its standard error", error),
    ):
        print(f"  {name:20}", {step: round(rows[step], 3) for step in sorted(rows)}, flush=True)
    for name, one in (("before", model), ("after", done.fine_tuned_model)):
        said = client.chat.completions.create(model=one, messages=asked(FIRST_HELD_OUT), max_tokens=24, temperature=0)
        print(f"  {name}: {said.choices[0].message.content!r}", flush=True)
    return {"steps": steps, "held_out": held_out, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    print(f"load before {os.getloadavg()}", flush=True)
    with tempfile.TemporaryDirectory() as folder, whole_box(Path(folder), "[box]\ndevices = 2\n") as box:
        model = "base" if options.model else "starter"
        if options.model:
            box.run("model", "import", str(options.model), "--name", model, timeout_s=600)
        else:
            box.make_starter(steps=60)
        for seed in options.seeds:
            found[str(seed)] = run(box, model, seed, options)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    print(f"load after {os.getloadavg()}, {time.strftime('%Y-%m-%d')}")
    size = f"{'SmolLM2-135M' if options.model else 'starter'}, LoRA of rank 16, {options.steps} steps"
    before, after = (
        [pick(one["held_out"].items(), key=lambda row: int(row[0]))[1] for one in found.values()] for pick in (min, max)
    )
    rows = [stated("mean reward held out, before: mean", size, statistics.mean(before), "")]
    rows.append(stated("mean reward held out, after: mean", size, statistics.mean(after), ""))
    if len(found) > 1:
        noise = max(statistics.stdev(before), statistics.stdev(after))
        gain = statistics.mean(after) - statistics.mean(before)
        rows.append(
            at_least("mean reward held out, gain by the deviation of seeds", size, gain / max(noise, 1e-9), "x", 3)
        )
        print(f"before {before}, after {after}: gain {gain:.3f}, {gain / max(noise, 1e-9):.1f} deviations of the seeds")
    record(__file__, rows)


if __name__ == "__main__":
    main()
