"""A hand-over: `moves` (pure) lists the holders that leave devices, take devices or change in place. `Runner` carries
out these moves with `release_devices` and `take_devices`, which pair each step with its undo.

Moves that leave devices all start at once. A move that takes devices starts when their holders have left (`needs`), so
a device never has two holders. An engine that has not reported its devices may be on any device.

Every step is journalled before and after, and has a time limit. When a step fails, the steps before it are undone, back
to the last point of no return. So every move ends in the wanted or the previous state, or, if an engine had to be
stopped, with a cold engine. Verbs are idempotent: after a crash between any two steps another round is enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Allocation, Holder, Policy, ReplicaState, ReplicaView, Workload
from scheduler.handover.effects import Box, Detail, Effects, GroupView, HandoverState, Journal, StepRecord, StepState

log = logging.getLogger(__name__)

How = Literal["sleep", "stop", "suspend", "end", "wake", "start", "train", "swap", "open"]
SERVING = ("open", "ready", "draining")
"""States of an engine that may have requests."""


@dataclass(frozen=True, slots=True)
class Move:
    """One holder's part of a hand-over.

    how, for side "free": drain a serving replica, then "sleep" or "stop" it; "suspend" a job, or "end" it if it is
    over. For "take": "wake" or "start" a replica as in `plan`; "train" a job. For "swap": "swap" the version of a
    replica, or "open" it. devices: devices that the holder leaves or takes. needs: holders that must leave first.
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
    """Return the moves that turn `box` into `wanted` and clean up dead holders; those that leave devices come first.

    Args:
        busy: holders that a hand-over in progress is moving; they are skipped.
        over: jobs that will not run again (cancelled, deleted): stopped instead of suspended.
        forced: jobs whose suspend failed too often: stopped now, and resumed later from the last snapshot.
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
    on: dict[str, set[Holder]] = {}  # by device; "": holders whose device is unknown
    for move in free:
        unknown = move.holder.kind == "replica" and box.replicas[move.holder.id].state != "asleep"
        for device in move.devices or ("",) * unknown:
            on.setdefault(device, set()).add(move.holder)
    for move in _takes(box, wanted, leaving):
        if move.holder not in busy:
            # A job that changes devices needs itself: it must be suspended before it starts again.
            needs = ({move.holder} & leaving).union(*(on.get(device, ()) for device in ("", *move.devices)))
            take.append(replace(move, needs=frozenset(needs)))
    return (*free, *_first_swaps(swap, box, busy), *take)


def _takes(box: Box, wanted: Allocation, leaving: Collection[Holder]) -> Iterator[Move]:
    for plan in wanted.open_replicas:
        holder, now = Holder("replica", plan.id), box.replicas.get(plan.id)
        if now is None or now.state == "asleep":
            yield Move(holder, "take", "start" if now is None else "wake", plan.devices, plan)
    for job_id, devices in wanted.groups.items():
        holder = Holder("job", job_id)
        if job_id not in box.groups or holder in leaving:
            yield Move(holder, "take", "train", devices)


def _first_swaps(swap: Iterable[Move], box: Box, busy: Collection[Holder]) -> Iterator[Move]:
    """Keep only one swap per model to a version that no open engine has: a bad version would take down all engines."""
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


_WEIGHTS = "for the engine to load its weights and answer its first prompt"
STEPS = {
    "start_replica": ("start_replica_timeout_s", _WEIGHTS),
    "stop_replica": ("stop_timeout_s", "for the engine's processes to end"),
    "open_replica": ("open_timeout_s", "for every gateway to add the engine to its table"),
    "drain_replica": ("drain_timeout_s", "for the engine to answer its requests"),
    "sleep_replica": ("sleep_timeout_s", "for the engine to release its memory"),
    "wake_replica": ("start_replica_timeout_s", _WEIGHTS),
    "swap_replica": ("start_replica_timeout_s", "for the engine to load the new weights"),
    "start_group": ("start_group_timeout_s", "for all ranks to be in their training loop"),
    "suspend_group": ("suspend_timeout_s", "for the ranks to end their step and write a snapshot"),
    "stop_group": ("stop_timeout_s", "for the ranks' processes to end"),
}
"""By verb of `effects.Effects`: the setting of its time limit, and what it waits for."""
_LOADS = ("start_replica", "wake_replica", "swap_replica")
"""A timeout of these verbs is the engine's fault; of other verbs, the box's."""


MoveState = Literal["done", "undone", "failed", "skipped", "cancelled"]
"""done: the wanted state was reached. undone: rolled back to the previous state. failed: an undo failed too. skipped:
the move never began. cancelled: rolled back because the plan changed, which is not a failure."""


@dataclass(slots=True)
class RunningStep:
    """A step in progress since `since_s` that fails after `limit_s`. `cancelled`: the reason for cancelling it."""

    move: Move
    verb: str
    since_s: float
    limit_s: float
    task: asyncio.Task[Any]
    cancelled: str = ""


class Listener(Protocol):
    """The loop's methods that a hand-over calls. `box` is replaced, never changed in place."""

    box: Box

    def unwanted(self, move: Move) -> bool:
        """Whether a move that is about to take devices should be skipped."""

    def step_done(self, move: Move, verb: str, took_s: float, detail: Detail) -> None: ...

    def move_ended(self, move: Move, state: MoveState, failure: EffectFailed | None) -> None: ...


class Runner:
    """Carries out one hand-over, whose journal record is open. `carry_out` does one move; the last move to end closes
    the record. `before`, `policy`, `workload`: box, policy and workload when the hand-over was decided."""

    def __init__(
        self,
        handover_id: int,
        moves: tuple[Move, ...],
        listener: Listener,
        effects: Effects,
        journal: Journal,
        clock: Callable[[], float],
        config: SchedulerConfig,
        policy: Policy,
        workload: Workload,
    ):
        self._id, self.moves, self.before = handover_id, moves, listener.box
        self.policy, self.workload = policy, workload
        self._loop, self._effects, self._journal = listener, effects, journal
        self._now_s, self._config = clock, config
        loop = asyncio.get_running_loop()
        self._released = {move.holder: loop.create_future() for move in moves if move.side == "free"}
        self._skipped: set[Move] = set()
        self._states: list[MoveState] = []
        self._errors: list[str] = []
        self._steps: dict[int, RunningStep] = {}
        self._seq = 0

    @property
    def ended(self) -> bool:
        return len(self._states) == len(self.moves)

    @property
    def running_steps(self) -> tuple[RunningStep, ...]:
        """The steps in progress that are not being cancelled."""
        return tuple(step for step in self._steps.values() if not step.cancelled)

    def waiting_for(self, holder: Holder) -> list[Move]:
        """The moves that take devices from this leaving holder."""
        return [move for move in self.moves if move.side == "take" and holder in move.needs]

    def cancel(self, step: RunningStep, reason: str) -> None:
        """Cancel and undo a step in progress. On return, moves that waited for its holder to leave have ended:
        otherwise they would still have a claim on devices of a replica that is open again."""
        step.cancelled = reason
        step.task.cancel()
        for move in self.waiting_for(step.move.holder) if step.move.side == "free" else ():
            if move not in self._skipped:
                self._skipped.add(move)
                self._loop.move_ended(move, "skipped", None)

    # --- moves --------------------------------------------------------------------------------------------------

    async def carry_out(self, move: Move) -> None:
        """Wait until the holders in `needs` have left, then do the move. Raises only for bugs."""
        do = {"free": self.release_devices, "take": self.take_devices, "swap": self.change_in_place}[move.side]
        state: MoveState = "failed"
        failure: EffectFailed | None = None
        try:
            stayed = [holder for holder in sorted(move.needs) if not await asyncio.shield(self._released[holder])]
            if stayed or move in self._skipped or self._loop.unwanted(move):
                state = "skipped"
            else:
                await do(move)
                state = "done"
        except EffectFailed as error:
            if error.undone:
                state = "cancelled" if error.cancelled else "undone"
            failure = None if error.cancelled else error
            self._errors.append(error.reason if error.cancelled else f"{error.step}: {error.reason}")
        finally:
            if move.side == "free":
                self._released[move.holder].set_result(state == "done")
        if move not in self._skipped:
            self._loop.move_ended(move, state, failure)
        self._states.append(state)
        if self.ended:
            states = {*self._states}
            end: HandoverState = "failed" if "failed" in states else "done" if states == {"done"} else "undone"
            self._journal.end(self._id, end, self._now_s(), "; ".join(self._errors))

    async def release_devices(self, move: Move) -> None:
        """Make the holder leave its devices. Once the holder sleeps, is stopped or is suspended, there is no undo."""
        holder = move.holder
        if holder.kind == "job":
            # A failed suspend leaves the group running, as it was before.
            await self._run_step(move, "suspend_group" if move.how == "suspend" else "stop_group", holder.id)
            self._loop.box = self._loop.box.without(holder)
        else:
            state = self._loop.box.replicas[holder.id].state
            try:
                if state in SERVING:
                    self._enter_replica(holder.id, "draining")
                    await self._run_step(move, "drain_replica", holder.id)
                if move.how == "sleep":
                    await self._sleep_or_stop(move)
                else:
                    await self._run_step(move, "stop_replica", holder.id)
                    self._loop.box = self._loop.box.without(holder)
            except EffectFailed as error:
                if state == "open" and await self._undo(error, move, "open_replica"):
                    self._enter_replica(holder.id, "open")
                raise
        if move.devices:
            self._note(move, "release")

    async def _sleep_or_stop(self, move: Move) -> None:
        """Make the engine sleep; stop its process if it cannot sleep, because it must not keep its devices."""
        try:
            await self._run_step(move, "sleep_replica", move.holder.id)
            self._enter_replica(move.holder.id, "asleep")
        except EffectFailed as error:
            if not await self._undo(error, move, "stop_replica"):
                raise
            self._loop.box = self._loop.box.without(move.holder)

    async def take_devices(self, move: Move) -> None:
        """Give the holder its devices: wake or start an engine and open it, or start a job's ranks."""
        self._acquire(move)
        holder, plan = move.holder, move.plan
        try:
            if plan is None:
                await self._run_step(move, "start_group", holder.id, move.devices, self._lease(move))
                self._enter_group(move)
            else:
                if move.how == "wake":
                    await self._run_step(move, "wake_replica", plan.id, plan.model, plan.version)
                else:
                    await self._run_step(move, "start_replica", plan)
                self._enter_replica(plan.id, "ready", plan.version)
                await self._run_step(move, "open_replica", plan.id)
                self._enter_replica(plan.id, "open")
        except EffectFailed as error:
            # The undo stops the engine: the box does not reuse a process that failed to wake.
            if await self._undo(error, move, "stop_group" if plan is None else "stop_replica"):
                self._loop.box = self._loop.box.without(holder)
                self._note(move, "release")
            raise

    def _acquire(self, move: Move) -> None:
        """Record the holder in the box. Raises EffectFailed if a device is gone or has another holder."""
        box, plan = self._loop.box, move.plan
        others = {d: holder for d, holder in box.holders.items() if d in move.devices and holder != move.holder}
        errors = [f"device {d} is gone" for d in move.devices if d not in box.devices]
        errors += [f"device {d} is still held by {holder}" for d, holder in others.items()]
        if errors:
            self._note(move, "acquire", "failed", {"error": errors[0]})
            failure = EffectFailed(errors[0], "outside")
            failure.step = f"acquire {self._lease(move)}"
            raise failure
        if plan is None:
            self._enter_group(move)
        elif plan.id in box.replicas:
            self._enter_replica(plan.id, "starting")
        else:
            self._loop.box = box.with_replica(replace(plan, state="starting", since_s=self._now_s()))
        self._note(move, "acquire")

    async def change_in_place(self, move: Move) -> None:
        """Swap the version of a replica, keeping its requests, and open it. No undo: after a failed swap the engine
        serves the old version or is dead."""
        plan = move.plan
        assert plan is not None
        if move.how == "swap":
            await self._run_step(move, "swap_replica", plan.id, plan.model, plan.version)
            changed = replace(self._loop.box.replicas[plan.id], version=plan.version)
            self._loop.box = self._loop.box.with_replica(changed)
        if self._loop.box.replicas[plan.id].state != "open":
            await self._run_step(move, "open_replica", plan.id)
            self._enter_replica(plan.id, "open")

    def _lease(self, move: Move) -> str:
        """Return a unique new name for the holder's right to its devices, for the history."""
        return f"{self._id}:{move.holder.kind}:{move.holder.id}"

    # --- steps --------------------------------------------------------------------------------------------------

    async def _undo(self, cause: EffectFailed, move: Move, verb: str) -> bool:
        """Undo the steps before the failed step. True if all undo steps succeeded."""
        try:
            await self._run_step(move, verb, move.holder.id, undoes=cause.seq)
        except EffectFailed:
            cause.undone = False
        return cause.undone

    async def _run_step(self, move: Move, verb: str, *arguments: Any, undoes: int | None = None) -> None:
        """Run one step of a move within its time limit. Raises EffectFailed on failure and after `cancel`."""
        limit_s, task = getattr(self._config, STEPS[verb][0]), asyncio.current_task()
        assert task is not None
        step = RunningStep(move, verb, self._now_s(), limit_s, task)
        detail: dict[str, Any] = {"devices": list(move.devices)} if verb in (*_LOADS, "start_group") else {}
        if verb in _LOADS and move.plan is not None:
            detail |= {"model": move.plan.model, "version": move.plan.version}
        record = self._record(move, verb, move.holder.id, detail, undoes)
        self._journal.step(self._id, record)
        self._steps[record.seq] = step
        try:
            async with asyncio.timeout(limit_s):
                result = await getattr(self._effects, verb)(*arguments)
        except EffectFailed as error:
            failure = error
        except TimeoutError:
            reason = f"took longer than its limit of {limit_s:g} s"
            failure = EffectFailed(reason, "own" if verb in _LOADS else "outside")
        except asyncio.CancelledError:
            if not step.cancelled or task.uncancel():  # the loop itself is ending
                raise
            failure = EffectFailed(f"cancelled: {step.cancelled}")
            failure.cancelled = True
        else:
            self._end(move, record, "done", result)
            return self._loop.step_done(move, verb, self._now_s() - step.since_s, result)
        finally:
            del self._steps[record.seq]
        failure.step, failure.seq = f"{verb} {move.holder.id}", record.seq
        if failure.cancelled:
            self._end(move, record, "skipped", {"reason": failure.reason})
        else:
            self._end(move, record, "failed", {"error": failure.reason})
        raise failure

    def _note(self, move: Move, verb: str, state: StepState = "done", detail: Detail = None) -> None:
        """Journal an acquisition or release of devices as a step without duration."""
        record = self._record(move, verb, self._lease(move), {"devices": list(move.devices)})
        self._end(move, record, state, detail)

    def _record(
        self, move: Move, verb: str, target: str, detail: dict[str, Any], undoes: int | None = None
    ) -> StepRecord:
        record = StepRecord(self._seq, move.name, verb, target, "doing", self._now_s(), None, detail, undoes)
        self._seq += 1
        return record

    def _end(self, move: Move, record: StepRecord, state: StepState, detail: Mapping[str, Any] | None) -> None:
        merged = {**record.detail, **(detail or {})}
        self._journal.step(self._id, replace(record, state=state, ended_s=self._now_s(), detail=merged))
        level = logging.WARNING if state == "failed" else logging.INFO
        if log.isEnabledFor(level):  # simulations run millions of steps
            ids = {"job_id" if move.holder.kind == "job" else "replica": move.holder.id}
            ids |= {key: merged[key] for key in ("model", "version") if key in merged}
            log.log(level, "%s %s: %s", record.verb, record.target, merged.get("error", state), extra=ids)

    def _enter_group(self, move: Move) -> None:
        group = GroupView(move.holder.id, move.devices, self._now_s(), run=self._lease(move))
        self._loop.box = self._loop.box.with_group(group)

    def _enter_replica(self, replica_id: str, state: ReplicaState, version: str = "") -> None:
        """Record the engine's new state, and its new version unless `version` is ""."""
        old = self._loop.box.replicas[replica_id]
        self._loop.box = self._loop.box.with_replica(
            replace(old, state=state, version=version or old.version, since_s=self._now_s())
        )
