"""Decides which drains in progress to cancel because their reason has changed. Pure functions.

A drain is the one long step of a release: the engine answers its requests before it sleeps. Until then staying costs
nothing, so a mode that switches back, or new requests, should not wait for a sleep and a wake. The planner itself
decides: had the hand-over not begun, would it leave the replica open? Only an external change (the mode, or more
requests for the model than when the drain began) triggers the question, so a plan cannot oscillate on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.core.inventory import Holder
from scheduler.core.workload import Policy, Workload
from scheduler.handover.effects import Box
from scheduler.handover.handover import Runner, RunningStep
from scheduler.loop.view import Transition

Drain = tuple[Runner, RunningStep]


def drains_to_reconsider(runners: Iterable[Runner], policy: Policy, workload: Workload) -> list[Drain]:
    """The drains of open replicas whose reason may be gone: the mode changed, or the model has more requests than when
    the hand-over was decided."""
    drains = []
    for runner in runners:
        before, now = _requests(runner.workload), _requests(workload)
        for step in runner.running_steps:
            replica = runner.before.replicas.get(step.move.holder.id)
            if step.verb == "drain_replica" and replica is not None and replica.state == "open":
                if runner.policy != policy or now.get(replica.model, 0) > before.get(replica.model, 0):
                    drains.append((runner, step))
    return drains


def as_if_not_begun(
    box: Box, moving: Mapping[Holder, Transition], drains: Iterable[Drain]
) -> tuple[Box, dict[Holder, Transition]]:
    """Box and movements as they would be without these drains and the takes that wait for them."""
    replicas, others = dict(box.replicas), dict(moving)
    for runner, step in drains:
        drained = step.move.holder
        if drained.id in replicas:
            replicas[drained.id] = runner.before.replicas[drained.id]
        others.pop(drained, None)
        for take in runner.handover.take:
            transition = others.pop(take.holder, None) if drained in take.needs else None
            if transition is not None and transition.moves > 1:  # it also leaves devices, and continues with that
                others[take.holder] = Transition(transition.moves - 1)
    return replace(box, replicas=replicas), others


def _requests(workload: Workload) -> dict[str, int]:
    return {d.model: d.demand.requests for d in workload.deployments}
