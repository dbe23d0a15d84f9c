"""Times `plan` and `moves` at 8 to 1,024 devices with up to 1,250 jobs.

    python -m benchmarks.plan_scale

Each size is timed "cold" (nothing runs yet, all holders are placed), "steady" (all run, nothing changes) and
"burst" (traffic claims a tenth of the devices).
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from benchmarks._claims import at_most, record
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Allocation, Demand, DeploymentView, Device, JobView, PlanInput, Policy, ReplicaView
from scheduler.handover.effects import Box, GroupView
from scheduler.handover.handover import moves
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
    """Return the plan input and the box after this allocation has been carried out."""
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


def timed_ms(plan_input: PlanInput, box: Box) -> float:
    """Return the median milliseconds that `plan` and `moves` take together."""
    seconds = []
    for _ in range(9):
        began_s = time.perf_counter()
        moves(box, plan(plan_input, NOW_S, CONFIG))
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    for devices, jobs in SIZES:
        first = cold(devices, jobs)
        running, box = after(first, plan(first, NOW_S, CONFIG))
        empty = Box({d.id: d for d in first.devices})
        worlds = {"cold": (first, empty), "steady": (running, box), "burst": (burst(running), box)}
        size = f"{devices:,} devices, {jobs:,} jobs"
        record(
            __file__, [at_most(f"a decision, {name}", size, timed_ms(*one), "ms", 50) for name, one in worlds.items()]
        )


if __name__ == "__main__":
    main()
