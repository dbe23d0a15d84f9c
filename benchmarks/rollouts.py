"""A job of rewards twice on one box, its answers sampled by the ranks and then by an engine: time and rewards.

    python benchmarks/rollouts.py [--steps N] [--tokens N] [--json FILE]

Two CPU devices in mode `split`, one for the ranks and one for the engine; a starter, LoRA of rank 8, sums, two prompts
of eight answers in a step, the same prompts and the same settings in both jobs. Prints for each job the mean reward by
step, and the medians of what a step takes, without its first two, which also compile and wake.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import record, stated  # noqa: E402 - the path comes first
from tests.e2e.box_support import whole_box  # noqa: E402
from tests.e2e.test_box_rewards import job_of, steps_of  # noqa: E402

PARTS = ("sampling", "grading", "training", "full_iteration")
WARMING = 2


def job(box, client, rollouts: str, steps: int, tokens: int) -> dict[int, dict]:
    """The data of each step's event."""
    learning = {"learning_rate": 0.003, "lora_rank": 8}
    made = job_of(box, client, steps, rollouts=rollouts, max_completion_tokens=tokens, **learning)
    box.run("job", "wait", made.id, "--timeout", "1800", timeout_s=1900)
    found = steps_of(client, made.id)
    assert found.keys() == set(range(1, steps + 1)), f"{rollouts}: steps {sorted(found)}"
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--tokens", type=int, default=12)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, whole_box(Path(folder), "[box]\ndevices = 2\n") as box:
        box.ask("model", "starter", "--minutes", "0.05")
        box.run("mode", "set", "split", "--train", "1", "--wait")
        client = box.client(max_retries=5)
        found = {who: job(box, client, who, asked.steps, asked.tokens) for who in ("ranks", "engine")}
    size, rows = f"starter, {asked.tokens} tokens", []
    for who, steps in found.items():
        later = [data["timing"]["step"] for step, data in steps.items() if step > WARMING]
        took_s = {part: statistics.median(step[part] for step in later) for part in PARTS}
        rewards = {step: round(data["train_mean_reward"], 2) for step, data in sorted(steps.items())}
        print(f"{who:7}", "  ".join(f"{part} {seconds:.2f} s" for part, seconds in took_s.items()))
        print(f"{'':7} reward by step {rewards}")
        if who == "engine":
            shares = [data["engine_samples"] for data in steps.values()]
            gaps = [(data["mismatch_mean"], data["mismatch_max"], data["mismatch_kl"]) for data in steps.values()]
            mean, most, divergence = (max(values) for values in zip(*gaps, strict=True))
            print(
                f"{'':7} by the engine {statistics.mean(shares):.2f}; largest of a step: mismatch mean {mean:.4f}, "
                f"max {most:.3f}, KL {divergence:.5f}"
            )
            rows.append(stated("samples by the engine", size, statistics.mean(shares), "share"))
        rows += [stated(f"step, rollouts by {who}: {part}", size, seconds, "s") for part, seconds in took_s.items()]
    record(__file__, rows)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
