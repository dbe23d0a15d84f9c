"""What a step asks of the box before it may begin, and what the box is while it is under way and after it.

Pure, one case per verb: the columns "must hold before" and "holds after" of docs/handover.md.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.workload import ReplicaView
from scheduler.handover.box import Box, GroupView
from scheduler.handover.handover import Step


def refusal(step: Step, box: Box) -> str:
    """Why the step must not be done in this box; empty if it may. Checked before every step."""
    replica, group = box.replicas.get(step.target), box.groups.get(step.target)
    match step.verb:
        case "acquire":
            assert step.lease is not None
            for device_id in step.lease.device_ids:
                lease = box.ledger.lease_on(device_id) if device_id in box.devices else None
                if device_id not in box.devices:
                    return f"device {device_id} is gone"
                if lease is not None and lease.id != step.lease.id:
                    return f"device {device_id} is still held by {lease.holder}"
        case "release":
            holder = step.lease.holder if step.lease else None
            if holder is not None and holder.kind == "replica":
                user = box.replicas.get(holder.id)
                if user is not None and user.awake:
                    return f"replica {holder.id} is awake on its devices"
            elif holder is not None and holder.id in box.groups:
                return f"job {holder.id} still has ranks on its devices"
        case "start_replica" | "wake_replica" | "start_group":
            assert step.lease is not None
            if box.ledger.lease(step.lease.id) != step.lease:
                return f"lease {step.lease.id} is not held"
            if step.verb == "wake_replica" and (replica is None or replica.state == "dead"):
                return "the engine is dead"
        case "open_replica" | "drain_replica" | "swap_replica":
            if replica is None or not replica.awake:
                return "the engine is not awake"
        case "sleep_replica":
            if replica is None or replica.state not in ("draining", "ready", "asleep"):
                return "the engine is not drained"
        case "suspend_group":
            if group is None:
                return "the job has no group of ranks"
    return ""


def begun(step: Step, box: Box, now_s: float) -> Box:
    """The box while the step is under way."""
    replica = box.replicas.get(step.target)
    match step.verb:
        case "start_replica":
            assert step.lease is not None
            new = ReplicaView(step.target, step.model, step.version, "starting", step.lease.device_ids, now_s)
            return replace(box, replicas={**box.replicas, step.target: new})
        case "wake_replica" if replica is not None:
            return _with_replica(box, replace(replica, state="starting", since_s=now_s))
        case "drain_replica" if replica is not None:
            return _with_replica(box, replace(replica, state="draining", since_s=now_s))
        case "start_group":
            assert step.lease is not None
            group = GroupView(step.target, step.lease.device_ids, now_s)
            return replace(box, groups={**box.groups, step.target: group})
    return box


def done(step: Step, box: Box, now_s: float) -> Box:
    """The box after the step."""
    replica = box.replicas.get(step.target)
    match step.verb:
        case "acquire":
            assert step.lease is not None
            return replace(box, ledger=box.ledger.acquire(step.lease))
        case "release":
            return replace(box, ledger=box.ledger.release(step.target))
        case "stop_replica":
            return replace(box, replicas={k: r for k, r in box.replicas.items() if k != step.target})
        case "suspend_group" | "stop_group":
            return replace(box, groups={k: g for k, g in box.groups.items() if k != step.target})
        case "start_group":
            assert step.lease is not None
            group = GroupView(step.target, step.lease.device_ids, now_s)
            return replace(box, groups={**box.groups, step.target: group})
    if replica is None or replica.state == "dead":
        return box
    match step.verb:
        case "start_replica" | "wake_replica":
            return _with_replica(
                box, replace(replica, state="ready", model=step.model, version=step.version, since_s=now_s)
            )
        case "open_replica":
            return _with_replica(box, replace(replica, state="open", since_s=now_s))
        case "drain_replica":
            return _with_replica(box, replace(replica, state="draining", since_s=now_s))
        case "sleep_replica":
            return _with_replica(box, replace(replica, state="asleep", since_s=now_s))
        case "swap_replica":
            return _with_replica(box, replace(replica, model=step.model, version=step.version))
    return box


def _with_replica(box: Box, replica: ReplicaView) -> Box:
    return replace(box, replicas={**box.replicas, replica.id: replica})


def holds(verb: str, target: str, version: str, box: Box) -> bool:
    """Whether the effect of a step is true in this box: how a hand-over that a crash interrupted is judged."""
    replica = box.replicas.get(target)
    match verb:
        case "acquire":
            return box.ledger.lease(target) is not None
        case "release":
            return box.ledger.lease(target) is None
        case "stop_replica":
            return replica is None
        case "sleep_replica":
            return replica is None or replica.state == "asleep"
        case "open_replica":
            return replica is not None and replica.state == "open"
        case "start_group":
            return target in box.groups
        case "suspend_group" | "stop_group":
            return target not in box.groups
        case "swap_replica":
            return replica is not None and replica.version == version
    return replica is not None and replica.awake
