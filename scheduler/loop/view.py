"""The loop's state as the planner sees it: every moving holder at its target. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scheduler.core.failures import Failures
from scheduler.core.inventory import CORDONED, Device, Holder
from scheduler.core.workload import DeploymentView, JobView, Policy, ReplicaView, Workload
from scheduler.handover.effects import Box
from scheduler.handover.handover import Runner, RunningStep
from scheduler.handover.moves import Move


@dataclass(slots=True)
class Transition:
    """A holder that a hand-over is moving: `moves` still to end, `target` the devices it will hold (if any). `over`: it
    ended by itself before it was suspended."""

    moves: int = 0
    target: tuple[str, ...] = ()
    take: Move | None = None
    over: bool = False


def device(device: Device, cordoned: frozenset[str]) -> Device:
    drains = not cordoned.isdisjoint((device.id, device.uuid)) and device.health == "ok"
    return replace(device, health="draining", health_reason=CORDONED) if drains else device


def job(
    job: JobView, box: Box, all_moving: Mapping[Holder, Transition], failures: Failures, pauses_s: Mapping[str, float]
) -> JobView:
    group = box.groups.get(job.id)
    moving = all_moving.get(Holder("job", job.id))
    failure = failures.jobs.get(job.id)
    alive = group is not None and group.ended is None
    phase = job.phase
    if phase != "paused":
        phase = "running" if alive else "suspended" if phase == "running" else phase
    devices = group.devices if group is not None and alive else ()
    busy = None
    if moving is not None:
        busy = "coming" if moving.target else "leaving"
        devices = moving.target or devices
    return replace(
        job,
        phase=phase,
        devices=devices,
        since_s=group.since_s if group else 0.0,
        not_before_s=failure.not_before_s if failure else 0.0,
        failed=failure.reason if failure else "",
        busy=busy,
        pause_s=pauses_s.get(job.id),
    )


def deployment(deployment: DeploymentView, failures: Failures) -> DeploymentView:
    failure = failures.model(deployment.model, deployment.version)
    if failure is None:
        return deployment
    return replace(deployment, failed=failure.reason, not_before_s=failure.not_before_s)


def replicas(box: Box, all_moving: Mapping[Holder, Transition], now_s: float) -> list[ReplicaView]:
    views = dict(box.replicas)
    for holder, moving in all_moving.items():
        if holder.kind != "replica":
            continue
        replica = views.get(holder.id)
        plan = moving.take.plan if moving.take is not None else None
        if moving.target and plan is not None and replica is None:
            replica = replace(plan, state="starting", since_s=now_s)
        if replica is not None:
            views[holder.id] = replace(replica, busy="coming" if moving.target else "leaving")
    return list(views.values())


def is_doubtful_drain(runner: Runner, step: RunningStep, policy: Policy, workload: Workload) -> bool:
    """Whether the reason for the drain of an open replica may be gone: the mode changed, or its model has more requests
    than when the hand-over was decided. Only such external changes count, so a plan cannot oscillate on its own."""
    replica = runner.before.replicas.get(step.move.holder.id)
    if replica is None or replica.state != "open":
        return False
    before, now = (
        next((d.demand.requests for d in known.deployments if d.model == replica.model), 0)
        for known in (runner.workload, workload)
    )
    return runner.policy != policy or now > before


def as_if_not_begun(
    box: Box, moving: Mapping[Holder, Transition], steps: Iterable[tuple[Runner, RunningStep]]
) -> tuple[Box, dict[Holder, Transition]]:
    """Box and movements as if these drains, and the takes that wait for them, had not begun, and as if the ranks that
    start were running."""
    replicas, others = dict(box.replicas), dict(moving)
    for runner, step in steps:
        holder = step.move.holder
        others.pop(holder, None)
        if step.verb != "drain_replica":
            continue
        if holder.id in replicas:
            replicas[holder.id] = runner.before.replicas[holder.id]
        for take in runner.waiting_for(holder):
            transition = others.pop(take.holder, None)
            if transition is not None and transition.moves > 1:  # it also leaves devices, and continues with that
                others[take.holder] = Transition(transition.moves - 1)
    return replace(box, replicas=replicas), others
