"""Decides which steps in progress to cancel because their reason has changed. Pure functions.

A drain is the one long step of a release: the engine answers its requests before it sleeps. Until then staying costs
nothing, so a mode that switches back, or new requests, should not wait for a sleep and a wake. Ranks may prepare their
data for minutes, of which only tokens are kept: a long start gives way as a running job would. The planner itself
decides: had the steps not begun, would it begin them? Only an external change (the mode, or more requests for the model
than when a drain began) raises the question of a drain, so a plan cannot oscillate on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from scheduler.core.inventory import Holder
from scheduler.core.workload import Policy, Workload
from scheduler.handover.effects import Box
from scheduler.handover.handover import Runner, RunningStep
from scheduler.loop.view import Transition

Step = tuple[Runner, RunningStep]


def doubtful_drains(runners: Iterable[Runner], policy: Policy, workload: Workload) -> list[Step]:
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


def long_starts(runners: Iterable[Runner], now_s: float, patience_s: Callable[[str], float]) -> list[Step]:
    """The starts of ranks that have lasted longer than the patience with their job."""
    steps = [(runner, step) for runner in runners for step in runner.running_steps if step.verb == "start_group"]
    return [(runner, step) for runner, step in steps if now_s - step.since_s >= patience_s(step.move.holder.id)]


def as_if_not_begun(
    box: Box, moving: Mapping[Holder, Transition], steps: Iterable[Step]
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
        for take in runner.handover.take:
            transition = others.pop(take.holder, None) if holder in take.needs else None
            if transition is not None and transition.moves > 1:  # it also leaves devices, and continues with that
                others[take.holder] = Transition(transition.moves - 1)
    return replace(box, replicas=replicas), others


def _requests(workload: Workload) -> dict[str, int]:
    return {d.model: d.demand.requests for d in workload.deployments}
