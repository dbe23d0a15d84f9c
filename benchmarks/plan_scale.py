"""What a decision costs as devices and jobs grow: `plan` and `moves` at 8 to 8,192 devices with up to 10,000 jobs.

    python benchmarks/plan_scale.py [--json FILE]

Three situations per size: "cold" (nothing runs yet, everything is placed), "steady" (everything runs, nothing
changes) and "burst" (traffic takes a tenth of the devices back). The growth is fitted over the sizes: time ~ n^k
with n = devices + jobs, by least squares on the logarithms, and time / (n log n) is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import at_most, record
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device
from scheduler.core.workload import Allocation, Demand, DeploymentView, JobView, PlanInput, Policy, ReplicaView
from scheduler.handover.moves import Box, GroupView, moves
from scheduler.plan.plan import plan

SIZES = ((8, 10), (64, 80), (1024, 1250), (8192, 10_000))
CONFIG = SchedulerConfig()
NOW_S = 1000.0


def cluster(devices: int) -> tuple[Device, ...]:
    return tuple(
        Device(f"n{n}/{i}", f"n{n}", i, "cuda", numa_node=i // 4) for n in range(devices // 8) for i in range(8)
    )


def cold(devices: int, jobs: int, seed: int = 0) -> PlanInput:
    rng = random.Random(seed)
    models = max(devices // 32, 1)
    return PlanInput(
        Policy("auto"),
        cluster(devices),
        jobs=tuple(
            JobView(
                f"j{n}",
                1,
                size,
                tuple(2**k for k in range(size.bit_length())),
                priority=rng.randrange(3),
                submitted_s=float(n),
            )
            for n in range(jobs)
            for size in (rng.choice((1, 1, 2, 4, 8, 16)),)
        ),
        deployments=tuple(
            DeploymentView(f"m{n}", "v1", rng.choice((1, 1, 2, 4)), 1, 16, Demand(inflight=40, last_request_s=NOW_S))
            for n in range(models)
        ),
        handover_id=1,
    )


def after(plan_input: PlanInput, allocation: Allocation) -> tuple[PlanInput, Box]:
    """The world in which this allocation has been carried out."""
    groups = {g.job_id: g.devices for g in allocation.groups}
    replicas = tuple(ReplicaView(r.id, r.model, r.version, r.state, r.devices) for r in allocation.replicas)
    jobs = tuple(
        replace(j, phase="running" if j.id in groups else "wanted", devices=groups.get(j.id, ()))
        for j in plan_input.jobs
    )
    box = Box(
        devices={d.id: d for d in plan_input.devices},
        replicas={r.id: r for r in replicas},
        groups={j: GroupView(j, d) for j, d in groups.items()},
    )
    return replace(plan_input, jobs=jobs, replicas=replicas, hysteresis=allocation.hysteresis, handover_id=2), box


def burst(plan_input: PlanInput) -> PlanInput:
    more = tuple(replace(d, demand=replace(d.demand, inflight=160)) for d in plan_input.deployments)
    return replace(plan_input, deployments=more)


def timed(plan_input: PlanInput, box: Box, repeat: int) -> tuple[float, int]:
    """(median seconds of plan and moves together, moves)."""
    seconds, count = [], 0
    for _ in range(repeat):
        began_s = time.perf_counter()
        allocation = plan(plan_input, NOW_S, CONFIG)
        count = len(moves(box, allocation, plan_input.handover_id).moves)
        seconds.append(time.perf_counter() - began_s)
    return sorted(seconds)[len(seconds) // 2], count


def growth(points: list[tuple[int, float]]) -> float:
    """The exponent k of time ~ n^k."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(s) for _, s in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def measure(sizes: tuple[tuple[int, int], ...] = SIZES) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    points: dict[str, list[tuple[int, float]]] = {"cold": [], "steady": [], "burst": []}
    for devices, jobs in sizes:
        first = cold(devices, jobs)
        empty = Box({d.id: d for d in first.devices})
        running, box = after(first, plan(first, NOW_S, CONFIG))
        repeat = 3 if devices > 2000 else 9
        for name, plan_input, world in (
            ("cold", first, empty),
            ("steady", running, box),
            ("burst", burst(running), box),
        ):
            seconds, count = timed(plan_input, world, repeat)
            n = devices + jobs
            points[name].append((n, seconds))
            rows.append(
                {
                    "situation": name,
                    "devices": devices,
                    "jobs": jobs,
                    "moves": count,
                    "decision_ms": seconds * 1e3,
                    "us_per_n_log_n": seconds * 1e6 / (n * math.log2(n)),
                }
            )
    return {
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "rows": rows,
        # The two largest decades only: at 8 devices the fixed cost of a call hides the growth.
        "growth_exponent": {name: growth(found[-3:]) for name, found in points.items()},
        "n_log_n_exponent": growth([(n, n * math.log2(n)) for n, _ in points["cold"][-3:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = measure()
    print(f"{'situation':10}{'devices':>9}{'jobs':>8}{'moves':>8}{'decision ms':>13}{'us / n log n':>14}")
    for r in result["rows"]:
        print(
            f"{r['situation']:10}{r['devices']:9}{r['jobs']:8}{r['moves']:8}"
            f"{r['decision_ms']:13.2f}{r['us_per_n_log_n']:14.3f}"
        )
    for name, k in result["growth_exponent"].items():
        print(f"{name}: time ~ n^{k:.2f} (n log n over the same sizes: n^{result['n_log_n_exponent']:.2f})")
    largest = f"{result['rows'][-1]['devices']} devices"
    record(
        __file__,
        [
            at_most(f"a decision at 1,024 devices, {r['situation']}", f"{r['jobs']} jobs", r["decision_ms"], "ms", 50)
            for r in result["rows"]
            if r["devices"] == 1024
        ]
        + [
            at_most(f"growth of a decision, {name}", f"to {largest}", k, "of n^k", round(result["n_log_n_exponent"], 2))
            for name, k in result["growth_exponent"].items()
        ],
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
