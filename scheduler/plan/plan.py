"""plan(plan_input, now) -> allocation: who should hold which exact devices. Pure; its only memory is an argument.

Order of the decision: how many devices serving claims (policy, demand, floor) -> how many training gets (queue) -> the
rest is lent to models with demand or stays with open engines (all of it in shares.py) -> exact devices, moving as
little as possible: a holder of unchanged size keeps its devices, a sleeping engine wakes where it sleeps
(device_assignment.py).
"""

from __future__ import annotations

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Allocation, PlanInput
from scheduler.plan import queue
from scheduler.plan.device_assignment import DeviceAssignment
from scheduler.plan.shares import Shares

_ROUNDS = 8
"""How often to recount jobs that found fewer devices side by side; after that the next plan handles them."""


def plan(plan_input: PlanInput, now_s: float, config: SchedulerConfig | None = None) -> Allocation:
    """The allocation for this input. The same input and time always give the same result."""
    config = config or SchedulerConfig()
    shares = Shares(plan_input, now_s, config)
    assignment = DeviceAssignment(plan_input, now_s, config)
    jobs = _assign(shares, assignment)
    assignment.keep_open()
    assignment.defer()
    assignment.let_sleep()
    late = {job_id: "Its devices are still being given back by their last holder." for job_id in jobs.sizes}
    reviews = [*shares.reviews, *assignment.reviews, *jobs.reviews]
    return Allocation(
        replicas=tuple(assignment.out[r] for r in sorted(assignment.out)),
        groups=dict(sorted(assignment.groups.items())),
        waiting={**jobs.waiting, **{j: why for j, why in late.items() if j not in assignment.groups}},
        notes=shares.notes,
        hysteresis=shares.hysteresis,
        review_at_s=min((t for t in reviews if t is not None and t > now_s), default=None),
    )


def _assign(shares: Shares, assignment: DeviceAssignment) -> queue.Queue:
    """Count and place until every counted replica and job has devices. Returns training's queue."""
    limits: dict[str, int] = {}
    side_by_side: dict[str, int] = {}
    unplaced: list[str] = []
    for _ in range(len(shares.deployments) + _ROUNDS):
        claimed, serving, jobs = shares.count(limits, side_by_side)
        unplaced = assignment.place(serving, jobs.sizes)
        short = assignment.short(jobs.sizes)
        if (short or (unplaced and assignment.owed(unplaced, claimed))) and assignment.jobs_may_move:
            # Enough devices but not side by side: move the jobs that may be moved, if that helps.
            if not assignment.place(serving, jobs.sizes, keep_jobs=False) and not assignment.short(jobs.sizes):
                unplaced, short = [], {}
            else:
                unplaced = assignment.place(serving, jobs.sizes)
        if not unplaced and not short:
            break
        # Unavailable in this round: the devices counted for these go to others.
        limits |= assignment.placed(unplaced)
        side_by_side |= short
    shares.note_no_room({*unplaced, *limits})
    return jobs
