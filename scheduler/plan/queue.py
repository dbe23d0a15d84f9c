"""Decides how many devices each training job gets, and writes a sentence on why a job gets none.

Strict order: priority; jobs that would miss their deadline if they waited longer, nearest deadline first; fair share
between owners (each owner's first job before any owner's second); running jobs; submission. In that order every job
takes the largest size it may run at: a later job never passes one that could run, and later jobs use the remaining
devices (backfill). Running jobs are preemptible by default, so the head of the queue never starves behind backfilled
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.core.workload import JobView, node_of


@dataclass(frozen=True, slots=True)
class Queue:
    """sizes: number of devices by job id, for jobs that get devices. waiting: by job id, why the job gets no devices.
    reviews: times at which the result may change without an event."""

    sizes: dict[str, int]
    waiting: dict[str, str]
    reviews: list[float | None]


URGENCY = 1.5
"""A job is urgent when the time to its deadline is below this factor times its remaining run time at its largest
size."""


def urgent_from_s(job: JobView) -> float | None:
    """Return when the job becomes urgent: at its deadline if the remaining work is unknown. None without a deadline."""
    if job.deadline_s is None:
        return None
    left_s = (job.remaining_device_s or 0.0) / job.sizes[-1]
    return job.deadline_s - URGENCY * left_s


def order(jobs: Sequence[JobView], now_s: float) -> list[JobView]:
    """Return the jobs in queue order. A job moves forward only when earlier jobs end or its deadline nears."""
    nth: dict[str, int] = {}
    seen: dict[tuple[str, int], int] = {}
    for job in sorted(jobs, key=lambda j: (j.submitted_s, j.id)):
        # A job that cannot run now must not delay its owner's next one.
        if job.wants_devices(now_s):
            nth[job.id] = seen[job.owner, job.priority] = seen.get((job.owner, job.priority), -1) + 1

    def key(job: JobView) -> tuple[object, ...]:
        from_s = urgent_from_s(job)
        urgent = from_s is not None and from_s <= now_s
        deadline_s = job.deadline_s if urgent else None
        return (
            -job.priority,
            not urgent,
            deadline_s or 0.0,
            nth.get(job.id, 0),
            job.phase != "running",
            job.submitted_s,
            job.id,
        )

    return sorted(jobs, key=key)


def positions(jobs: Sequence[JobView], now_s: float) -> list[tuple[JobView, str | None]]:
    """Return every job in queue order, with Slurm's code for the reason why it waits; None while it has devices.

    JobHeldUser: paused by request. BeginTime: in backoff after a failure. Priority: other jobs are ahead. Resources: it
    is next and waits for devices, or for something that the box lacks.
    """
    out, waiting = [], False
    for job in order(jobs, now_s):
        barred = _barred(job, now_s)
        reason = barred[0] if barred else None
        if not reason and (barred or not job.devices):
            reason = "Priority" if waiting else "Resources"
            waiting = True
        out.append((job, reason))
    return out


def _largest_node(job: JobView, free: Mapping[str, int]) -> int:
    """Number of devices of the largest node that the job may run on."""
    return max([free.get(node, 0) for node in job.nodes] if job.nodes else free.values(), default=0)


def _reserve(job: JobView, size: int, free: dict[str, int]) -> None:
    """Take devices as the placement will: on the job's current node, else on the tightest node with enough."""
    here, nodes = {node_of(d) for d in job.devices}, job.nodes or tuple(free)
    fitting = [node for node in nodes if free.get(node, 0) >= size] or nodes
    if fitting:
        best = min(fitting, key=lambda node: (node not in here, free.get(node, 0)))
        free[best] = free.get(best, 0) - size


def _ahead(job: JobView, ahead: JobView) -> str:
    """Return a phrase on the jobs ahead. The waiting job's owner reads it, so it must not name another owner's job."""
    return f"job {ahead.id} and others ahead of it" if ahead.owner == job.owner else "jobs ahead of it"


def _barred(job: JobView, now_s: float) -> tuple[str, str, float | None] | None:
    """Return (code, sentence) on why the job gets no devices however many are free, and when this ends by itself; None
    if it may get devices."""
    if job.phase == "paused":
        why = "Paused by request; `appliance job resume` queues it again."
        return "JobHeldUser", why, None
    if job.lacks:
        return "Resources", job.lacks, None
    if job.not_before_s > now_s:
        cause = f" ({job.failed})" if job.failed else ""
        why = f"Failed a moment ago{cause}; next try in {job.not_before_s - now_s:.0f} s."
        return "BeginTime", why, job.not_before_s
    if job.busy == "leaving":
        return "", "Is being suspended.", None
    return None


def allot(
    jobs: Sequence[JobView],
    budget: int,
    now_s: float,
    dwell_s: float,
    why: str,
    usable_on: Mapping[str, int],
    side_by_side: Mapping[str, int] | None = None,
) -> Queue:
    """Decide the number of devices of each job within `budget` devices.

    Args:
        budget: devices that training may have. Jobs that must not be preempted may exceed the budget.
        dwell_s: seconds after its last start before a running job may grow.
        why: what holds the other devices, e.g. "mode serve gives training no devices".
        usable_on: usable devices by node; a job gets devices of one node only.
        side_by_side: number of devices on one node by job, for jobs that could not be placed as planned.
    """
    free = dict(usable_on)
    sizes: dict[str, int] = {}
    waiting: dict[str, str] = {}
    left, ordered = budget, order(jobs, now_s)
    reviews = [urgent_from_s(job) for job in jobs]
    for job in ordered:
        if job.keeps_devices(now_s):
            sizes[job.id] = len(job.devices)
            left -= len(job.devices)
            _reserve(job, len(job.devices), free)
    ahead: JobView | None = None
    for job in ordered:
        if job.id in sizes:
            ahead = ahead or job
            continue
        if (barred := _barred(job, now_s)) is not None:
            _, waiting[job.id], again_s = barred
            reviews.append(again_s)
            continue
        most = min(left, _largest_node(job, free))
        room = min(most, (side_by_side or {}).get(job.id, left))
        size = max((size for size in job.sizes if size <= room), default=0)
        now = len(job.devices) if job.phase == "running" else 0
        grown_again_s = job.since_s + dwell_s
        if size > now > 0 and now in job.sizes and grown_again_s > now_s:
            size = now
            reviews.append(grown_again_s)
        if size:
            sizes[job.id] = size
            left -= size
            _reserve(job, size, free)
            ahead = ahead or job
        elif side_by_side and job.id in side_by_side:
            waiting[job.id] = f"Needs {_at_least(job)} of one node; the free ones are on several nodes."
        else:
            total, largest = sum(usable_on.values()), _largest_node(job, usable_on)
            waiting[job.id] = _too_few(job, total, largest, budget, why) or (
                f"Needs {_at_least(job)}; {max(most, 0)} of training's {budget} are left by "
                f"{_ahead(job, ahead) if ahead else 'jobs that are not preempted'}."
            )
    return Queue(sizes, waiting, reviews)


def _at_least(job: JobView) -> str:
    return f"{job.sizes[0]} device{'s' * (job.sizes[0] > 1)}"


def _too_few(job: JobView, total: int, largest: int, budget: int, why: str) -> str:
    """Return a sentence if the job would get no devices even alone; else "". largest: devices of its largest node."""
    least = job.sizes[0]
    if least > total:
        return f"Needs {least} devices; only {total} of the box work."
    if least > largest:
        return f"Needs {least} devices of one node; the largest that it may use has {largest}."
    return f"Needs {_at_least(job)}: {why}." if least > budget else ""
