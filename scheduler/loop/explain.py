"""Describes the loop to users: its state as values for JSON, and the reasons for its moves as sentences. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from scheduler.core.failures import Failure
from scheduler.core.workload import FULL, Allocation, DeploymentView, JobView, PlanInput, Policy, ReplicaView
from scheduler.handover.effects import Box
from scheduler.handover.handover import STEPS, Move, RunningStep
from scheduler.loop.mode_schedule import InForce
from scheduler.plan.queue import positions


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


_DONE = {
    "open": "takes requests again",
    "suspend": "is suspended at its next step",
    "sleep": "finishes its requests and goes to sleep",
    "end": "has ended and leaves its devices",
    "stop": "is stopped",
}


def sentence(move: Move) -> str:
    """Return the effect of one move as a sentence without a full stop."""
    who, plan, on = str(move.holder), move.plan, ", ".join(move.devices)
    if move.how == "train":
        return f"{who} runs on {_count(len(move.devices), 'device')} ({on})"
    if plan is not None and move.side == "take":
        return f"{who} {move.how}s with {plan.model} on {on}"
    if plan is not None and move.how == "swap":
        return f"{who} changes to version {plan.version}"
    return f"{who} {_DONE[move.how]}"


def because(move: Move, allocation: Allocation, plan_input: PlanInput) -> str:
    """Return the reason for a move as a clause without a full stop."""
    views: Sequence[JobView | ReplicaView] = plan_input.jobs if move.holder.kind == "job" else plan_input.replicas
    now = next((view for view in views if view.id == move.holder.id), None)
    devices = set(move.devices or (now.devices if now is not None else ()))
    unusable = [d for d in plan_input.devices if d.id in devices and not d.usable]
    if move.side == "free" and unusable:
        return f"{unusable[0].id} is {unusable[0].health} ({unusable[0].health_reason or 'no reason was given'})"
    if move.holder.kind == "job":
        return _why_job(move, now if isinstance(now, JobView) else None, allocation, plan_input)
    return _why_replica(move, now if isinstance(now, ReplicaView) else None, devices, allocation, plan_input)


def _why_job(move: Move, job: JobView | None, allocation: Allocation, plan_input: PlanInput) -> str:
    if job is None:
        return "it has ended or was cancelled"
    if move.side == "free":
        if (group := allocation.groups.get(job.id)) is not None:
            return f"it continues with {_count(len(group), 'device')} instead of {len(job.devices)}"
        reason = allocation.waiting.get(job.id, "training releases its devices").rstrip(".")
        return f"it n{reason[1:]}" if reason.startswith("Needs ") else reason[:1].lower() + reason[1:]
    training = sum(map(len, allocation.groups.values()))
    return f"training gets {training} of {len(plan_input.devices)} devices in {mode_of(plan_input.policy)}"


def _why_replica(
    move: Move, now: ReplicaView | None, devices: set[str], allocation: Allocation, plan_input: PlanInput
) -> str:
    model = now.model if now is not None else move.plan.model if move.plan is not None else ""
    deployment = next((d for d in plan_input.deployments if d.model == model), None)
    if deployment is None:
        return "its model is no longer served"
    requests = deployment.demand.requests
    if move.side == "swap" or (now is not None and now.refused == deployment.version != now.version):
        return f"{deployment.version} is the active version of {model}"
    if move.side == "take":
        if requests:
            return f"{model} has {_count(requests, 'request')}"
        if deployment.floor_replicas:
            return f"{model} keeps at least {_count(deployment.floor_replicas, 'replica')}"
        return f"{mode_of(plan_input.policy)} gives serving its devices, and {model} had requests recently"
    takers = {f"job {job_id}": taken for job_id, taken in allocation.groups.items()}
    takers |= {f"replica {r.id} of {r.model}": r.devices for r in allocation.open_replicas if r.id != move.holder.id}
    if shared := next(((who, devices & {*taken}) for who, taken in takers.items() if devices & {*taken}), None):
        return f"{shared[0]} gets {', '.join(sorted(shared[1]))}"
    if now is not None and now.state == "dead":
        return "its engine died"
    return f"{mode_of(plan_input.policy)} leaves serving fewer devices" if requests else f"{model} has no requests now"


def mode_of(policy: Policy) -> str:
    return f"mode {policy.kind}" + (f" {policy.train_devices}" if policy.kind == "split" else "")


def reason_of(moves: Iterable[Move], policy: Policy) -> str:
    """Return the mode and the changes as one line for the history."""
    texts = [sentence(move) for move in moves]
    more = f"; and {len(texts) - 4} more" if len(texts) > 4 else ""
    return f"{mode_of(policy)}: {'; '.join(texts[:4])}{more}"


def waits_for(step: RunningStep, now_s: float) -> str:
    """Return, as a sentence without a full stop, what a step in progress waits for."""
    return (
        f"{step.verb} {step.move.holder.id} has waited {now_s - step.since_s:.0f} s {STEPS[step.verb][1]}; "
        f"it fails after {step.limit_s:.0f} s"
    )


def explain(moves: Iterable[Move], allocation: Allocation, plan_input: PlanInput, now_s: float) -> dict[str, Any]:
    """Return a sentence for each move, each waiting job and each model with too few replicas, as values for JSON."""
    opened: dict[str, list[list[str]]] = {}
    for replica in allocation.open_replicas:
        opened.setdefault(replica.model, []).append(list(replica.devices))
    steps = (f"{sentence(move)}, because {because(move, allocation, plan_input)}." for move in moves)
    return {
        "policy": plan_input.policy.kind,
        "train_devices": plan_input.policy.train_devices,
        "serving_floor": plan_input.policy.serving_floor,
        "steps": [step[:1].upper() + step[1:] for step in steps],
        "waiting": dict(allocation.waiting),
        "notes": dict(allocation.notes),
        "standby": {
            d.model: f"By its traffic, keeps {_count(d.standby.replicas, 'replica')} awake, and wakes more when "
            f"the backlog takes {d.standby.backlog_share:.0%} of the target for the first token or requests fill "
            f"{FULL:.0%} of them."
            for d in plan_input.deployments
            if d.standby is not None
        },
        "idle": {
            d.model: _awake(d, now_s) for d in plan_input.deployments if d.model in opened and not d.demand.requests
        },
        "jobs": {job_id: list(devices) for job_id, devices in allocation.groups.items()},
        "models": opened,
    }


def _awake(deployment: DeploymentView, now_s: float) -> str:
    """Return how long a model stays awake without requests, unless the mode's share for serving keeps it awake."""
    if least := deployment.floor_replicas:
        return f"Stays awake: at least {_count(least, 'replica')} (pinned or min_replicas)."
    if deployment.idle_after_s == inf:
        return "Stays awake until another holder needs its devices: it has no idle_sleep_s."
    left_s, own_s = max(deployment.last_s + deployment.idle_after_s - now_s, 0.0), deployment.idle_sleep_s
    why = "no user deployed it" if own_s is None else f"its idle_sleep_s is {own_s:g} s"
    return f"Stays awake for {left_s:.0f} s more without a request: {why}."


def trouble(model: str, failure: Failure, replicas: Iterable[ReplicaView], now_s: float) -> dict[str, Any]:
    """Return the failures of a model's engines as values for JSON."""
    states = {replica.state for replica in replicas if replica.model == model}
    if "starting" in states or "ready" in states:
        when = "a retry is in progress"
    elif failure.not_before_s > now_s:
        when = f"next try in {max(1.0, failure.not_before_s - now_s):.0f} s"
    else:
        when = "the next request starts a retry"
    state = "another engine does not start" if "open" in states else "not serving"
    fields = _fields(failure, "version reason blame count tries not_before_s lasting")
    return {"model": model, **fields, "message": f"{state}: {failure.reason}; {when}"}


def _fields(record: object, names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names.split()}


def status(box: Box, plan_input: PlanInput, allocation: Allocation, in_force: InForce, now_s: float) -> dict[str, Any]:
    """Return mode, devices with holders, replicas, and jobs in queue order as values for JSON."""
    policy, window, held = in_force.policy, in_force.window, box.holders
    of_device = "id node index kind name memory_bytes uuid health health_reason"
    return {
        "policy": {
            **_fields(policy, "kind train_devices serving_floor"),
            **_fields(in_force, "since_s until_s"),
            "schedule": window.cron if window else None,
            "window": window.id if window else None,
        },
        "devices": [
            {**_fields(d, of_device), "holder": _fields(held[d.id], "kind id") if d.id in held else None}
            for d in plan_input.devices
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
            for position, (job, reason) in enumerate(positions(plan_input.jobs, now_s), 1)
        ],
        "notes": dict(allocation.notes),
    }
