"""A job of rewards several times on one box, its answers sampled by the ranks, by an engine, and by an engine ahead:
time and rewards.

    python benchmarks/rollouts.py [--ways WAY ...] [--steps N] [--tokens N] [--prompts N] [--pin] [--json FILE]

Two CPU devices in mode `split`, one for the ranks and one for the engine; a starter, LoRA of rank 8, sums, prompts of
eight answers in a step, the same prompts and the same settings in all jobs. A way is `ranks`, `engine-N` for a
staleness of N, or `flight-N` for that in flight. Prints for each job the mean reward by step, the medians of what a
step takes, without its first two, which also compile and wake, the tokens of answers that are learnt in a second, the
share of a step in which the ranks wait, and that which writing the model for engines takes. `--pin` has the engine on
one core and the ranks on another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_least, at_most, record, stated  # noqa: E402 - the path comes first
from benchmarks._processor_time import cpu_of  # noqa: E402
from tests.e2e.box_support import wait_for, whole_box  # noqa: E402
from tests.e2e.test_box_rewards import job_of, steps_of  # noqa: E402

PARTS = ("publishing", "sampling", "grading", "training", "full_iteration")
WARMING = 2
AIMS = {"engine-1": 1.4, "flight-2": 2.0}
"""Times the throughput of engine-0."""


def job(box, client, way: str, steps: int, tokens: int, prompts: int) -> tuple[dict[int, dict], float]:
    """The data of each step's event, and seconds of processor time that the box took for a step."""
    who, _, staleness = way.partition("-")
    asked = {"learning_rate": 0.003, "lora_rank": 8, "batch_size": prompts, "rollouts": "engine" if staleness else who}
    if staleness:
        asked |= {"staleness": int(staleness), "in_flight": who == "flight"}
    made = job_of(box, client, steps * prompts // 2, max_completion_tokens=tokens, **asked)
    first, before_s = reached(box, made.id, WARMING), cpu_of(box)
    last, after_s = reached(box, made.id, steps), cpu_of(box)
    box.run("job", "wait", made.id, "--timeout", "1800", timeout_s=1900)
    found = steps_of(client, made.id)
    assert found.keys() == set(range(1, steps + 1)), f"{way}: steps {sorted(found)}"
    return found, (after_s - before_s) / (last - first)


def reached(box, job_id: str, step: int) -> int:
    """Waits for the step of the job; the newest of its steps."""

    def newest() -> int:
        return max((row["step"] for row in box.steps(job_id)), default=0)

    wait_for(lambda: newest() >= step, f"step {step}", 1800)
    return newest()


def keep_apart(box, ended: threading.Event) -> None:
    """Engines on core 0, ranks on core 1, whenever they were started."""
    while not ended.wait(1.0):
        for core, pattern in ((0, "engine-*.log"), (1, "*-rank*.log")):
            for pid in box.pids_logging_to(pattern):
                try:
                    for task in os.listdir(f"/proc/{pid}/task"):
                        os.sched_setaffinity(int(task), {core})
                except (FileNotFoundError, ProcessLookupError):
                    continue


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ways", nargs="+", default=["engine-0", "engine-1", "engine-2", "flight-1", "flight-2"])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--tokens", type=int, default=12)
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--pin", action="store_true")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    print(f"load before {os.getloadavg()}", flush=True)
    with tempfile.TemporaryDirectory() as folder, whole_box(Path(folder), "[box]\ndevices = 2\n") as box:
        box.make_starter()
        box.run("mode", "set", "split", "--train", "1", "--wait")
        client, ended = box.client(max_retries=5), threading.Event()
        if asked.pin:
            threading.Thread(target=keep_apart, args=(box, ended), daemon=True).start()
        found = {way: job(box, client, way, asked.steps, asked.tokens, asked.prompts) for way in asked.ways}
        ended.set()
    print(f"load after {os.getloadavg()}")
    size, rows, speeds, cores = f"starter, {asked.prompts} prompts, {asked.tokens} tokens", [], {}, os.cpu_count() or 1
    size += ", a core each" if asked.pin else ""
    synchronous: list[dict[str, float]] = []
    for way, (steps, cpu_s) in found.items():
        later = [data for step, data in steps.items() if step > WARMING]
        timed = [data["timing"]["step"] for data in later]
        took_s = {part: statistics.median(step.get(part, 0.0) for step in timed) for part in PARTS}
        whole_s = sum(step["full_iteration"] for step in timed)
        written = sum(data["completion_tokens_mean"] * 8 * asked.prompts for data in later)
        speeds[way] = written / whole_s
        idle = sum(step["sampling"] + step["grading"] for step in timed) / whole_s
        publishing = sum(step.get("publishing", 0.0) for step in timed) / whole_s
        rewards = {step: round(data["train_mean_reward"], 2) for step, data in sorted(steps.items())}
        print(f"{way:9}", "  ".join(f"{part} {seconds:.3f} s" for part, seconds in took_s.items()))
        print(f"{'':9} {speeds[way]:.0f} tokens/s; ranks wait {idle:.1%}, write the model {publishing:.1%}")
        print(f"{'':9} reward by step {rewards}")
        print(
            f"{'':9} processor time of a step {cpu_s:.3f} s: on {cores} cores it takes {cpu_s / cores:.3f} s at least"
        )
        rows.append(stated(f"step, rollouts by {way}: processor time", size, cpu_s, "s"))
        rows += [stated(f"step, rollouts by {way}: {part}", size, seconds, "s") for part, seconds in took_s.items()]
        rows.append(stated(f"answers learnt, rollouts by {way}", size, speeds[way], "tokens/s"))
        if way == "ranks":
            continue
        shares = [data["engine_samples"] for data in steps.values()]
        gaps = [(data["mismatch_mean"], data["mismatch_max"], data["mismatch_kl"]) for data in steps.values()]
        mean, most, divergence = (max(values) for values in zip(*gaps, strict=True))
        stalest = max(data["staleness_max"] for data in steps.values())
        print(
            f"{'':9} by the engine {statistics.mean(shares):.2f}; largest of a step: staleness {stalest}, "
            f"mismatch mean {mean:.4f}, max {most:.3f}, KL {divergence:.5f}"
        )
        rows.append(stated(f"samples by the engine, {way}", size, statistics.mean(shares), "share"))
        rows.append(at_most(f"writing the model for engines, {way}", size, publishing, "share", 0.05))
        if way == "engine-0":
            synchronous = timed
        if way in AIMS:
            rows.append(at_most(f"ranks wait, {way}", size, idle, "share", 0.1))
            if "engine-0" in speeds:
                gain = speeds[way] / speeds["engine-0"]
                allowed = statistics.mean(step["full_iteration"] for step in synchronous) / (cpu_s / cores)
                print(f"{'':9} {gain:.2f} x engine-0, of {allowed:.2f} x that the processor time allows")
                rows.append(stated(f"throughput that processor time allows, {way} by engine-0", size, allowed, "x"))
                rows.append(at_least(f"throughput, {way} by engine-0", size, gain, "x", AIMS[way]))
    record(__file__, rows)
    if asked.json:
        asked.json.write_text(json.dumps({way: steps for way, (steps, _) in found.items()}, indent=1))


if __name__ == "__main__":
    main()
