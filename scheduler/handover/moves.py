"""Computes the moves of a hand-over: who leaves devices, who takes them, who changes in place. Pure.

Moves that leave run at once, all together. One that takes starts when the holders of its devices have left (`needs`),
so a device never has two holders; an engine that has not reported its devices may be on any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.core.inventory import Holder
from scheduler.core.workload import Allocation, ReplicaView
from scheduler.handover.effects import Box

How = Literal["sleep", "stop", "suspend", "end", "wake", "start", "train", "swap", "open"]
SERVING = ("open", "ready", "draining")
"""States of an engine that may have requests."""


@dataclass(frozen=True, slots=True)
class Move:
    """One holder's part of a hand-over.

    how: free: a replica is drained, if it serves, and put to "sleep" or "stop"ped; a job is "suspend"ed, or "end"ed if
    it is over. take: a replica "wake"s or "start"s as `plan` says, a job "train"s. swap: a replica takes another
    version ("swap"), or is "open"ed. devices: those that it leaves or takes. needs: holders that must leave first.
    """

    holder: Holder
    side: Literal["free", "take", "swap"]
    how: How
    devices: tuple[str, ...] = ()
    plan: ReplicaView | None = None
    needs: frozenset[Holder] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.side} {self.holder}"


def moves(
    box: Box,
    wanted: Allocation,
    *,
    busy: Collection[Holder] = (),
    over: Collection[str] = (),
    forced: Collection[str] = (),
) -> tuple[Move, ...]:
    """The moves that turn `box` into `wanted`, and that clean up after a crash or a death, those that leave first.

    Args:
        busy: holders that a hand-over in progress is moving; they are skipped.
        over: jobs that will not run again (cancelled, deleted): stopped instead of suspended.
        forced: jobs whose suspend failed too often: stopped; they resume from their last snapshot.
    """
    plans = {r.id: r for r in wanted.replicas}
    groups = {job_id: frozenset(devices) for job_id, devices in wanted.groups.items()}
    free, take, swap = [], [], []
    for replica in box.replicas.values():
        holder = Holder("replica", replica.id)
        if holder in busy:
            continue
        plan = plans.get(replica.id)
        if replica.state in SERVING and plan is not None and plan.state == "open":
            if plan.version != replica.version:
                swap.append(Move(holder, "swap", "swap", replica.devices, plan))
            elif replica.state != "open":
                swap.append(Move(holder, "swap", "open", replica.devices, plan))
        elif plan is None or replica.state != "asleep":
            how: How = "sleep" if replica.state in SERVING and plan is not None else "stop"
            free.append(Move(holder, "free", how, replica.devices if replica.state != "asleep" else ()))
    for group in box.groups.values():
        holder = Holder("job", group.job_id)
        if holder not in busy and (group.ended is not None or groups.get(group.job_id) != frozenset(group.devices)):
            gone = group.ended is not None or group.job_id in over or group.job_id in forced
            free.append(Move(holder, "free", "end" if gone else "suspend", group.devices))

    leaving = {move.holder for move in free}
    on: dict[str, set[Holder]] = {}  # by device; "": they may be on any
    for move in free:
        unknown = move.holder.kind == "replica" and box.replicas[move.holder.id].state != "asleep"
        for device in move.devices or ("",) * unknown:
            on.setdefault(device, set()).add(move.holder)
    for move in _takes(box, wanted, leaving):
        if move.holder not in busy:
            # Its own old devices too: a job must not start before it is suspended.
            needs = ({move.holder} & leaving).union(*(on.get(device, ()) for device in ("", *move.devices)))
            take.append(replace(move, needs=frozenset(needs)))
    return (*free, *_one_first(swap, box, busy), *take)


def _takes(box: Box, wanted: Allocation, leaving: Collection[Holder]) -> Iterator[Move]:
    for plan in wanted.open_replicas:
        holder, now = Holder("replica", plan.id), box.replicas.get(plan.id)
        if now is None or now.state == "asleep":
            yield Move(holder, "take", "start" if now is None else "wake", plan.devices, plan)
    for job_id, devices in wanted.groups.items():
        holder = Holder("job", job_id)
        if job_id not in box.groups or holder in leaving:
            yield Move(holder, "take", "train", devices)


def _one_first(swap: Iterable[Move], box: Box, busy: Collection[Holder]) -> Iterator[Move]:
    """Where no open engine has a model's version yet, one engine loads it first: a bad one would take down all."""
    open_ = [replica for replica in box.replicas.values() if replica.state == "open"]
    proven = {(replica.model, replica.version) for replica in open_}
    trying = {replica.model for replica in open_ if Holder("replica", replica.id) in busy}
    for move in swap:
        plan = move.plan
        if move.how == "open" or plan is None or (plan.model, plan.version) in proven:
            yield move
        elif plan.model not in trying:
            trying.add(plan.model)
            yield move
