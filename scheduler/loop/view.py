"""Converts the loop's state for the planner and for users. Pure functions; the loop owns what they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.core.failures import Failure, Failures
from scheduler.core.inventory import CORDONED, Device, Holder
from scheduler.core.workload import Allocation, DeploymentView, JobView, PlanInput, ReplicaView
from scheduler.handover.effects import Box
from scheduler.handover.moves import Move
from scheduler.loop.explain import not_serving
from scheduler.loop.job_pauses import JobPauses
from scheduler.loop.mode_schedule import InForce
from scheduler.plan.queue import positions


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
    job: JobView, box: Box, all_moving: Mapping[Holder, Transition], failures: Failures, pauses: JobPauses
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
        pause_s=pauses.pause_s.get(job.id),
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


def trouble(model: str, failure: Failure, replicas: Iterable[ReplicaView], now_s: float) -> dict[str, Any]:
    """A model whose engines fail, as plain values for JSON."""
    shown = _fields(failure, "version reason blame count tries not_before_s lasting")
    return {"model": model, **shown, "message": not_serving(model, failure, replicas, now_s)}


def _fields(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}


def status(box: Box, shown: PlanInput, allocation: Allocation, in_force: InForce, now_s: float) -> dict[str, Any]:
    """Mode, devices with their holders, replicas and jobs (in the order of the queue) as plain values for JSON."""
    policy, window, held = in_force.policy, in_force.window, box.holders
    of_device = "id node index kind name memory_bytes health health_reason"
    return {
        "policy": {
            **_fields(policy, "kind train_devices serving_floor"),
            **_fields(in_force, "since_s until_s"),
            "schedule": window.cron if window else None,
            "window": window.id if window else None,
        },
        "devices": [
            {**_fields(d, of_device), "holder": _fields(held[d.id], "kind id") if d.id in held else None}
            for d in shown.devices
        ],
        "replicas": [
            {**_fields(r, "id model version state since_s"), "devices": list(r.devices)} for r in box.replicas.values()
        ],
        "jobs": [
            {
                "id": job.id,
                "position": position,
                "phase": "running" if job.id in box.groups else job.phase,
                "devices": list(box.groups[job.id].devices) if job.id in box.groups else [],
                "reason": reason,
                "message": allocation.waiting.get(job.id, ""),
            }
            for position, (job, reason) in enumerate(positions(shown.jobs, now_s), 1)
        ],
        "notes": dict(allocation.notes),
    }
