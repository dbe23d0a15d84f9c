"""Defines the verbs of a hand-over, one row each: the step's precondition, the state of the box during and after it,
how it is performed, how long it may take, and the status text for what it waits for.

Pure except for `perform`; these are the columns "must hold before" and "holds after" of docs/handover.md. A new verb is
a row here and a method of `effects.Effects`, which the Ray and simulator implementations provide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.core.allocation import ReplicaPlan
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Lease
from scheduler.core.workload import ReplicaState, ReplicaView
from scheduler.handover.box import Box, GroupView
from scheduler.handover.effects import Detail, Effects
from scheduler.handover.step import Step

Change = Callable[[Step, Box, float], Box]


def _allowed(step: Step, box: Box) -> str:
    return ""


def _unchanged(step: Step, box: Box, now_s: float) -> Box:
    return box


@dataclass(frozen=True, slots=True)
class Verb:
    """`limit_s`: time limit. `waits_for`: what a running step waits for, completing "has waited 3 s". `target`: what
    the verb acts on; "" is a lease. `refusal`: why it must not run in this box, empty if it may. `begun`, `done`: the
    box during and after it, at a time. `holds`: whether its effect on (target, version) is true in this box.
    `no_return`: earlier steps are not undone after it. `blames`: "box": any failure is the box's fault, not the job's
    or model's; "engine": exceeding the time limit is the engine's fault.
    """

    name: str
    limit_s: Callable[[SchedulerConfig], float]
    waits_for: str
    target: Literal["", "replica", "job"]
    perform: Callable[[Effects, Step], Awaitable[Detail]]
    holds: Callable[[str, str, Box], bool]
    refusal: Callable[[Step, Box], str] = _allowed
    begun: Change = _unchanged
    done: Change = _unchanged
    no_return: bool = False
    blames: Literal["", "box", "engine"] = ""


# --- what may be done ---------------------------------------------------------------------------------------------


def _lease(step: Step) -> Lease:
    assert step.lease is not None
    return step.lease


def _devices_are_free(step: Step, box: Box) -> str:
    wanted = _lease(step)
    for device_id in wanted.device_ids:
        lease = box.ledger.lease_on(device_id) if device_id in box.devices else None
        if device_id not in box.devices:
            return f"device {device_id} is gone"
        if lease is not None and lease.id != wanted.id:
            return f"device {device_id} is still held by {lease.holder}"
    return ""


def _holder_has_left(step: Step, box: Box) -> str:
    holder = step.lease.holder if step.lease else None
    if holder is not None and holder.kind == "replica":
        user = box.replicas.get(holder.id)
        if user is not None and user.awake:
            return f"replica {holder.id} is awake on its devices"
    elif holder is not None and holder.id in box.groups:
        return f"job {holder.id} still has ranks on its devices"
    return ""


def _lease_is_held(step: Step, box: Box) -> str:
    lease = _lease(step)
    return "" if box.ledger.lease(lease.id) == lease else f"lease {lease.id} is not held"


def _may_wake(step: Step, box: Box) -> str:
    replica = box.replicas.get(step.target)
    dead = replica is None or replica.state == "dead"
    return _lease_is_held(step, box) or ("the engine is dead" if dead else "")


def _is_awake(step: Step, box: Box) -> str:
    replica = box.replicas.get(step.target)
    return "" if replica is not None and replica.awake else "the engine is not awake"


def _is_drained(step: Step, box: Box) -> str:
    replica = box.replicas.get(step.target)
    drained = replica is not None and replica.state in ("draining", "ready", "asleep")
    return "" if drained else "the engine is not drained"


def _has_ranks(step: Step, box: Box) -> str:
    return "" if step.target in box.groups else "the job has no group of ranks"


# --- what it makes of the box -------------------------------------------------------------------------------------


def _with_replica(box: Box, replica: ReplicaView) -> Box:
    return replace(box, replicas={**box.replicas, replica.id: replica})


def _living(step: Step, box: Box) -> ReplicaView | None:
    replica = box.replicas.get(step.target)
    return None if replica is None or replica.state == "dead" else replica


def _becomes(state: ReplicaState) -> Change:
    def change(step: Step, box: Box, now_s: float) -> Box:
        replica = _living(step, box)
        return box if replica is None else _with_replica(box, replace(replica, state=state, since_s=now_s))

    return change


def _marked(state: ReplicaState) -> Change:
    """Like `_becomes`, but also for a dead engine: the step itself reports whether the engine lives."""

    def change(step: Step, box: Box, now_s: float) -> Box:
        replica = box.replicas.get(step.target)
        return box if replica is None else _with_replica(box, replace(replica, state=state, since_s=now_s))

    return change


def _acquired(step: Step, box: Box, now_s: float) -> Box:
    return replace(box, ledger=box.ledger.acquire(_lease(step)))


def _released(step: Step, box: Box, now_s: float) -> Box:
    return replace(box, ledger=box.ledger.release(step.target))


def _new_replica(step: Step, box: Box, now_s: float) -> Box:
    devices = _lease(step).device_ids
    started = ReplicaView(step.target, step.model, step.version, "starting", devices, now_s, settings=step.settings)
    return _with_replica(box, started)


def _loaded(step: Step, box: Box, now_s: float) -> Box:
    replica = _living(step, box)
    if replica is None:
        return box
    return _with_replica(box, replace(replica, state="ready", model=step.model, version=step.version, since_s=now_s))


def _swapped(step: Step, box: Box, now_s: float) -> Box:
    replica = _living(step, box)
    return box if replica is None else _with_replica(box, replace(replica, model=step.model, version=step.version))


def _replica_gone(step: Step, box: Box, now_s: float) -> Box:
    return replace(box, replicas={k: r for k, r in box.replicas.items() if k != step.target})


def _new_group(step: Step, box: Box, now_s: float) -> Box:
    return replace(box, groups={**box.groups, step.target: GroupView(step.target, _lease(step).device_ids, now_s)})


def _group_gone(step: Step, box: Box, now_s: float) -> Box:
    return replace(box, groups={k: g for k, g in box.groups.items() if k != step.target})


# --- whether it holds ---------------------------------------------------------------------------------------------


def _stands_awake(target: str, version: str, box: Box) -> bool:
    replica = box.replicas.get(target)
    return replica is not None and replica.awake


def _stands_open(target: str, version: str, box: Box) -> bool:
    replica = box.replicas.get(target)
    return replica is not None and replica.state == "open"


def _sleeps(target: str, version: str, box: Box) -> bool:
    replica = box.replicas.get(target)
    return replica is None or replica.state == "asleep"


def _has_version(target: str, version: str, box: Box) -> bool:
    replica = box.replicas.get(target)
    return replica is not None and replica.version == version


def _group_is_gone(target: str, version: str, box: Box) -> bool:
    return target not in box.groups


# --- the table ----------------------------------------------------------------------------------------------------


def _plan(step: Step) -> ReplicaPlan:
    devices = _lease(step).device_ids
    return ReplicaPlan(step.target, step.model, step.version, step.tensor_parallel, devices, "open", step.settings)


_WEIGHTS = "for the engine to load its weights and answer its first prompt"
_ROWS = (
    Verb(
        "acquire",
        lambda c: c.lease_timeout_s,
        "for Ray to grant the devices",
        "",
        lambda effects, step: effects.acquire(_lease(step)),
        lambda target, version, box: box.ledger.lease(target) is not None,
        refusal=_devices_are_free,
        begun=_acquired,  # from then on a look at the box keeps the devices in its books, though their node is lost
        done=_acquired,
        blames="box",
    ),
    Verb(
        "release",
        lambda c: c.lease_timeout_s,
        "for Ray to take the devices back",
        "",
        lambda effects, step: effects.release(step.target),
        lambda target, version, box: box.ledger.lease(target) is None,
        refusal=_holder_has_left,
        done=_released,
        blames="box",
    ),
    Verb(
        "start_replica",
        lambda c: c.start_replica_timeout_s,
        _WEIGHTS,
        "replica",
        lambda effects, step: effects.start_replica(_plan(step), _lease(step).id),
        _stands_awake,
        refusal=_lease_is_held,
        begun=_new_replica,
        done=_loaded,
        blames="engine",
    ),
    Verb(
        "stop_replica",
        lambda c: c.stop_timeout_s,
        "for the engine's processes to be gone",
        "replica",
        lambda effects, step: effects.stop_replica(step.target),
        lambda target, version, box: target not in box.replicas,
        done=_replica_gone,
        no_return=True,
    ),
    Verb(
        "open_replica",
        lambda c: c.open_timeout_s,
        "for every gateway to know of the engine",
        "replica",
        lambda effects, step: effects.open_replica(step.target),
        _stands_open,
        refusal=_is_awake,
        done=_becomes("open"),
    ),
    Verb(
        "drain_replica",
        lambda c: c.drain_timeout_s,
        "for the engine's requests to be answered",
        "replica",
        lambda effects, step: effects.drain_replica(step.target),
        _stands_awake,
        refusal=_is_awake,
        begun=_marked("draining"),
        done=_becomes("draining"),
    ),
    Verb(
        "sleep_replica",
        lambda c: c.sleep_timeout_s,
        "for the engine to give its memory back",
        "replica",
        lambda effects, step: effects.sleep_replica(step.target),
        _sleeps,
        refusal=_is_drained,
        done=_becomes("asleep"),
        no_return=True,
    ),
    Verb(
        "wake_replica",
        lambda c: c.wake_timeout_s,
        _WEIGHTS,
        "replica",
        lambda effects, step: effects.wake_replica(step.target, step.model, step.version, _lease(step).id),
        _stands_awake,
        refusal=_may_wake,
        begun=_marked("starting"),
        done=_loaded,
        blames="engine",
    ),
    Verb(
        "swap_replica",
        lambda c: c.swap_timeout_s,
        "for the engine to take the new weights",
        "replica",
        lambda effects, step: effects.swap_replica(step.target, step.model, step.version),
        _has_version,
        refusal=_is_awake,
        done=_swapped,
        blames="engine",
    ),
    Verb(
        "start_group",
        lambda c: c.start_group_timeout_s,
        "for all ranks to be in their training loop",
        "job",
        lambda effects, step: effects.start_group(step.target, _lease(step)),
        lambda target, version, box: target in box.groups,
        refusal=_lease_is_held,
        begun=_new_group,
        done=_new_group,
    ),
    Verb(
        "suspend_group",
        lambda c: c.suspend_timeout_s,
        "for the ranks to leave their step and write a snapshot",
        "job",
        lambda effects, step: effects.suspend_group(step.target),
        _group_is_gone,
        refusal=_has_ranks,
        done=_group_gone,
        no_return=True,
    ),
    Verb(
        "stop_group",
        lambda c: c.stop_timeout_s,
        "for the ranks' processes to be gone",
        "job",
        lambda effects, step: effects.stop_group(step.target),
        _group_is_gone,
        done=_group_gone,
        no_return=True,
    ),
)
VERBS = {verb.name: verb for verb in _ROWS}
