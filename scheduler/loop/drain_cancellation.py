"""Decides which drains in progress to cancel because their reason has changed. Pure functions.

A drain is the one long step of giving back: the engine answers its requests before it sleeps. Until then staying costs
nothing, so a mode that switches back, or new requests, should not wait for a sleep and a wake. The planner itself
decides: had the hand-over not begun, would it leave the replica open? Only an external change (the mode, or more
requests for the model than when the drain began) triggers the question, so a plan cannot oscillate on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scheduler.core.inventory import Holder
from scheduler.core.workload import Allocation, Policy, ReplicaView, Workload
from scheduler.handover.effects import Box
from scheduler.handover.moves import Handover
from scheduler.loop.view import Transition


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica being drained. `replica`: its state before. `policy`, `requests` of its model: when it was decided.
    `waiting`: holders whose moves wait for its devices."""

    replica: ReplicaView
    policy: Policy
    requests: int
    waiting: tuple[Holder, ...]

    @property
    def holder(self) -> Holder:
        return Holder("replica", self.replica.id)


def drains_of(handover: Handover, box: Box, policy: Policy, workload: Workload) -> dict[Holder, Drain]:
    """The drains of a hand-over that is about to begin, of replicas that are open."""
    requests = _requests(workload)
    found = {}
    for move in handover.free:
        replica = box.replicas.get(move.holder.id)
        if replica is not None and replica.state == "open":
            waiting = tuple(take.holder for take in handover.take if move.holder in take.needs)
            found[move.holder] = Drain(replica, policy, requests.get(replica.model, 0), waiting)
    return found


def worth_asking(drains: Iterable[Drain], policy: Policy, workload: Workload) -> list[Drain]:
    """The drains whose reason may be gone: the mode changed, or the model has more requests than then."""
    requests = _requests(workload)
    return [d for d in drains if d.policy != policy or requests.get(d.replica.model, 0) > d.requests]


def as_if_not_begun(
    box: Box, moving: Mapping[Holder, Transition], drains: Iterable[Drain]
) -> tuple[Box, dict[Holder, Transition]]:
    """Box and movements as they would be without these drains and the takes that wait for them."""
    replicas, left = dict(box.replicas), dict(moving)
    for drain in drains:
        if drain.replica.id in replicas:
            replicas[drain.replica.id] = drain.replica
        left.pop(drain.holder, None)
        for holder in drain.waiting:
            found = left.pop(holder, None)
            if found is not None and found.moves > 1:  # it also leaves devices, and continues with that
                left[holder] = Transition(found.moves - 1, (), None)
    return replace(box, replicas=replicas), left


def to_cancel(drains: Iterable[Drain], allocation: Allocation) -> list[Drain]:
    """The drains whose replica stays open in place in the plan made as if they had not begun."""
    stays = {(plan.id, plan.devices) for plan in allocation.open_replicas}
    return [drain for drain in drains if (drain.replica.id, drain.replica.devices) in stays]


def _requests(workload: Workload) -> dict[str, int]:
    return {d.model: d.demand.requests for d in workload.deployments}
