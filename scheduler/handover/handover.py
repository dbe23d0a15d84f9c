"""Computes the chains of a hand-over: how devices change hands, from start to end.

A hand-over is a set of chains, one per holder and side. A chain is a list of steps done one after the other.

    give back   replica   drain_replica -> sleep_replica* -> release        (or stop_replica* instead of sleep)
                job       suspend_group* -> release                         (or stop_group* if the job is over)
    take        replica   acquire -> wake_replica | start_replica -> open_replica
                job       acquire -> start_group
    in place    replica   swap_replica                                      (a new version, requests kept; one engine
                                                                             of a model first, then the others)

Chains that give back run at once, all together. A chain that takes starts when the leases on its devices are released
(`needs`), so a device never has two holders. A cold engine starts when the waking engines of its model are up
(`after`): requests wait for the first engine, and a cold start would take CPU that the wake needs.

When a step fails, its undo and those of the steps before it run in reverse, back to the last point of no return (marked
* above: from there the chain only goes forward). A step with `force` is not undone but completed by force. So every
chain ends in the wanted or in the previous state, or, if an engine had to be stopped, in the wanted state with a cold
engine. Verbs are idempotent, so after a crash between any two steps another round is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.core.allocation import Allocation, ReplicaPlan
from scheduler.core.inventory import Holder, Lease, node_of
from scheduler.core.workload import ReplicaView
from scheduler.handover.box import Box
from scheduler.handover.step import Step

Side = Literal["free", "take", "swap"]


# --- steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps of one holder on one side. `needs`: leases that must be released before it starts; `after`: holders whose
    take chains must have ended first, successfully or not."""

    holder: Holder
    side: Side
    steps: tuple[Step, ...]
    needs: frozenset[str] = frozenset()
    after: frozenset[Holder] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.side} {self.holder}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices it will hold; empty for a chain that gives back."""
        return next((s.lease.device_ids for s in self.steps if s.verb == "acquire" and s.lease), ())

    @property
    def waking(self) -> Step | None:
        """The step that starts or wakes an engine; None for a chain that does neither."""
        return next((s for s in self.steps if s.verb in ("start_replica", "wake_replica")), None)

    def step(self, verb: str) -> Step | None:
        return next((s for s in self.steps if s.verb == verb), None)


@dataclass(frozen=True, slots=True)
class Handover:
    id: int
    free: tuple[Chain, ...] = ()
    take: tuple[Chain, ...] = ()
    swap: tuple[Chain, ...] = ()

    @property
    def chains(self) -> tuple[Chain, ...]:
        return self.free + self.swap + self.take


def release(lease: Lease) -> Step:
    return Step("release", lease.id, lease=lease)


def acquire(lease: Lease) -> Step:
    return Step("acquire", lease.id, lease=lease, undo=(release(lease),))


def stop_replica(replica_id: str) -> Step:
    return Step("stop_replica", replica_id)


def open_replica(replica_id: str) -> Step:
    return Step("open_replica", replica_id)


def drain_replica(replica: ReplicaView) -> Step:
    undo = (open_replica(replica.id),) if replica.state == "open" else ()
    return Step("drain_replica", replica.id, undo=undo)


def sleep_replica(replica_id: str) -> Step:
    # An engine that cannot sleep must not keep its devices: stopping its process frees the memory.
    return Step("sleep_replica", replica_id, force=(stop_replica(replica_id),))


def wake_or_start(replica: ReplicaPlan, lease: Lease, *, asleep: bool) -> Step:
    # Not put to sleep again on failure: a process that failed to wake is not reused.
    return Step(
        "wake_replica" if asleep else "start_replica",
        replica.id,
        lease=lease,
        model=replica.model,
        version=replica.version,
        tensor_parallel=replica.tensor_parallel,
        settings=replica.settings,
        undo=(stop_replica(replica.id),),
    )


def swap_replica(replica: ReplicaPlan) -> Step:
    # No undo here: the verb itself leaves the old version or a dead engine.
    return Step("swap_replica", replica.id, model=replica.model, version=replica.version)


def start_group(job_id: str, lease: Lease) -> Step:
    return Step("start_group", job_id, lease=lease, undo=(stop_group(job_id),))


def suspend_group(job_id: str) -> Step:
    # A failed suspend leaves the group running, which is the previous state. See `forced` in steps().
    return Step("suspend_group", job_id)


def stop_group(job_id: str) -> Step:
    return Step("stop_group", job_id)


# --- from the current to the wanted state ---------------------------------------------------------------------------


def steps(
    box: Box,
    wanted: Allocation,
    handover_id: int,
    *,
    busy: Collection[Holder] = (),
    over: Collection[str] = (),
    forced: Collection[str] = (),
) -> Handover:
    """The chains that turn `box` into `wanted`, and that clean up after a crash or a death.

    Args:
        handover_id: a number never used before; it makes new lease ids unique.
        busy: holders that a hand-over in progress is moving; they are skipped.
        over: jobs that will not run again (cancelled, deleted): stopped instead of suspended.
        forced: jobs whose suspend failed too often: stopped; they resume from their last snapshot.
    """
    busy = frozenset(busy)
    leases: dict[Holder, list[Lease]] = {}
    for lease in box.ledger:
        leases.setdefault(lease.holder, []).append(lease)

    free, take, swap = [], [], []
    plans = {r.id: r for r in wanted.replicas}
    groups = {g.job_id: frozenset(g.devices) for g in wanted.groups}
    for replica in box.replicas.values():
        holder = Holder("replica", replica.id)
        if holder in busy:
            continue
        held = leases.pop(holder, [])
        free_steps, swap_steps = _leave(replica, plans.get(replica.id), held)
        if free_steps:
            free.append(Chain(holder, "free", free_steps))
        if swap_steps:
            swap.append(Chain(holder, "swap", swap_steps))
    for group in box.groups.values():
        holder = Holder("job", group.job_id)
        if holder in busy:
            continue
        held = leases.pop(holder, [])
        stays = not group.ended and len(held) == 1 and groups.get(group.job_id) == frozenset(group.devices)
        if not stays:
            gone = group.ended or group.job_id in over or group.job_id in forced or not held
            first = stop_group(group.job_id) if gone else suspend_group(group.job_id)
            free.append(Chain(holder, "free", (first, *map(release, held))))
    for holder, held in leases.items():
        if holder not in busy:  # a crash left this lease without a living holder
            free.append(Chain(holder, "free", tuple(map(release, held))))

    own = {c.holder: {s.target for s in c.steps if s.verb == "release"} for c in free}
    for chain in _takes(box, wanted, handover_id, own, busy):
        needs = {on.id for d in chain.devices if (on := box.ledger.lease_on(d)) is not None}
        # Also wait for its own old lease, even on other devices: a job must not start before it is suspended.
        take.append(replace(chain, needs=frozenset(needs | own.get(chain.holder, set()))))
    return Handover(handover_id, tuple(free), tuple(_wakes_first(take)), tuple(_one_first(swap, box, busy)))


def only_with_room(handover: Handover, book_engine: Callable[[str, str], bool]) -> Handover:
    """The hand-over without the engines that lack memory on the host of their node now (`book_engine`: model, node).
    No other chain waits for them either."""
    refused = {
        chain.holder
        for chain in handover.take
        if chain.waking is not None and not book_engine(chain.waking.model, node_of(chain.devices[0]))
    }
    if not refused:
        return handover
    take = (replace(chain, after=chain.after - refused) for chain in handover.take if chain.holder not in refused)
    return replace(handover, take=tuple(take))


def _one_first(swap: list[Chain], box: Box, busy: Collection[Holder]) -> Iterator[Chain]:
    """Where no open engine has a model's version yet, one engine loads it first: a bad one would take down all."""
    open_ = [replica for replica in box.replicas.values() if replica.state == "open"]
    proven = {(replica.model, replica.version) for replica in open_}
    trying = {replica.model for replica in open_ if Holder("replica", replica.id) in busy}
    for chain in swap:
        step = chain.step("swap_replica")
        if step is None or (step.model, step.version) in proven:
            yield chain
        elif step.model not in trying:
            trying.add(step.model)
            yield chain


def _wakes_first(take: list[Chain]) -> Iterator[Chain]:
    waking: dict[str, set[Holder]] = {}
    for chain in take:
        if (wake := chain.step("wake_replica")) is not None:
            waking.setdefault(wake.model, set()).add(chain.holder)
    for chain in take:
        cold = chain.step("start_replica")
        yield chain if cold is None else replace(chain, after=frozenset(waking.get(cold.model, ())))


def _leave(replica: ReplicaView, plan: ReplicaPlan | None, held: list[Lease]) -> tuple[tuple[Step, ...], tuple]:
    """(steps that give back, steps in place) of one replica."""
    back = tuple(map(release, held))
    serving = replica.state in ("open", "ready", "draining")
    if serving and plan is not None and plan.state == "open" and held:
        stay = (swap_replica(plan),) if plan.version != replica.version else ()
        return (), stay + ((open_replica(replica.id),) if replica.state != "open" else ())
    if serving and plan is not None and held:
        return (drain_replica(replica), sleep_replica(replica.id), *back), ()
    if serving:
        return (drain_replica(replica), stop_replica(replica.id), *back), ()
    if replica.state == "asleep" and plan is not None:
        return back, ()
    return (stop_replica(replica.id), *back), ()


def _takes(
    box: Box, wanted: Allocation, handover_id: int, leaving: Mapping[Holder, set[str]], busy: Collection[Holder]
) -> Iterator[Chain]:
    for plan in wanted.open_replicas:
        holder = Holder("replica", plan.id)
        now = box.replicas.get(plan.id)
        if holder in busy or (now is not None and (now.state != "asleep")):
            continue
        lease = Lease(f"{handover_id}:{holder.kind}:{plan.id}", holder, plan.devices)
        waking = wake_or_start(plan, lease, asleep=now is not None)
        yield Chain(holder, "take", (acquire(lease), waking, open_replica(plan.id)))
    for group in wanted.groups:
        holder = Holder("job", group.job_id)
        if holder in busy or (group.job_id in box.groups and not leaving.get(holder)):
            continue
        lease = Lease(f"{handover_id}:{holder.kind}:{group.job_id}", holder, group.devices)
        yield Chain(holder, "take", (acquire(lease), start_group(group.job_id, lease)))
