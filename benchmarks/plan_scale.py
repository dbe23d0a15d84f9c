"""What a decision costs as devices and jobs grow: `plan` and `moves` at 8 to 1,024 devices with up to 1,250 jobs.

    python benchmarks/plan_scale.py [--json FILE]

Three situations per size: "cold" (nothing runs yet, everything is placed), "steady" (everything runs, nothing
changes) and "burst" (traffic takes a tenth of the devices back).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import at_most, record
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device
from scheduler.core.workload import Allocation, Demand, DeploymentView, JobView, PlanInput, Policy, ReplicaView
from scheduler.handover.effects import Box, GroupView
from scheduler.handover.moves import moves
from scheduler.plan.plan import plan

SIZES = ((8, 10), (64, 80), (1024, 1250))
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
    groups = allocation.groups
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


def measure() -> list[dict[str, Any]]:
    rows = []
    for devices, jobs in SIZES:
        first = cold(devices, jobs)
        running, box = after(first, plan(first, NOW_S, CONFIG))
        worlds = {
            "cold": (first, Box({d.id: d for d in first.devices})),
            "steady": (running, box),
            "burst": (burst(running), box),
        }
        for name, (plan_input, world) in worlds.items():
            seconds, count = timed(plan_input, world, 3 if devices > 2000 else 9)
            row = {"situation": name, "devices": devices, "jobs": jobs, "moves": count, "decision_ms": seconds * 1e3}
            print(f"{name:10}{devices:9} devices{jobs:8} jobs{count:8} moves{seconds * 1e3:10.2f} ms", flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = measure()
    record(
        __file__,
        [
            at_most(
                f"a decision at 1,024 devices, {row['situation']}", f"{row['jobs']} jobs", row["decision_ms"], "ms", 50
            )
            for row in rows
            if row["devices"] == 1024
        ],
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
