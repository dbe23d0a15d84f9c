"""Carries out a hand-over: `release_devices` and `take_devices`, each step beside its undo.

Every step is journalled before and after, and has a time limit. When one fails, what came before it is undone, back to
the last point of no return. So every move ends in the wanted or in the previous state, or, if an engine had to be
stopped, with a cold engine. Verbs are idempotent: after a crash between any two steps another round is enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed, StepCancelled
from scheduler.core.inventory import Holder
from scheduler.core.workload import Policy, ReplicaState, Workload
from scheduler.handover.effects import Box, Detail, Effects, GroupView
from scheduler.handover.moves import SERVING, Handover, Move
from scheduler.handover.ports import HandoverState, Journal, StepRecord, StepState

log = logging.getLogger(__name__)

_WEIGHTS = "for the engine to load its weights and answer its first prompt"
STEPS = {
    "start_replica": ("start_replica_timeout_s", _WEIGHTS),
    "stop_replica": ("stop_timeout_s", "for the engine's processes to be gone"),
    "open_replica": ("open_timeout_s", "for every gateway to know of the engine"),
    "drain_replica": ("drain_timeout_s", "for the engine's requests to be answered"),
    "sleep_replica": ("sleep_timeout_s", "for the engine to release its memory"),
    "wake_replica": ("start_replica_timeout_s", _WEIGHTS),
    "swap_replica": ("start_replica_timeout_s", "for the engine to take the new weights"),
    "start_group": ("start_group_timeout_s", "for all ranks to be in their training loop"),
    "suspend_group": ("suspend_timeout_s", "for the ranks to leave their step and write a snapshot"),
    "stop_group": ("stop_timeout_s", "for the ranks' processes to be gone"),
}
"""By verb of `effects.Effects`: the setting that limits its time, and what it waits for."""
_LOADS = ("start_replica", "wake_replica", "swap_replica")
"""Exceeding their time is the engine's fault, of the others the box's."""


MoveState = Literal["done", "undone", "failed", "skipped", "cancelled"]
"""done: the wanted state was reached. undone: rolled back to the previous state. failed: an undo failed too. skipped:
the move never began. cancelled: rolled back because the plan changed, which is not a failure."""


@dataclass(slots=True)
class RunningStep:
    """A step in progress since `since_s`, which fails after `limit_s`. `cancelled`: why it is being cancelled."""

    move: Move
    verb: str
    since_s: float
    limit_s: float
    task: asyncio.Task[Any]
    cancelled: str = ""


class Listener(Protocol):
    """The loop as a hand-over sees it. `box` is replaced, never changed in place."""

    box: Box

    def unwanted(self, move: Move) -> bool:
        """Whether a move that is about to take devices should no longer do so."""

    def step_done(self, move: Move, verb: str, took_s: float, detail: Detail) -> None: ...

    def move_ended(self, move: Move, state: MoveState, failure: EffectFailed | None = None) -> None: ...


class Runner:
    """One hand-over. `run` returns when every move has ended; it raises only for bugs. `before`, `policy`, `workload`:
    as they were when it was decided."""

    def __init__(
        self,
        handover: Handover,
        listener: Listener,
        effects: Effects,
        journal: Journal,
        clock: Callable[[], float],
        config: SchedulerConfig,
        policy: Policy,
        workload: Workload,
    ):
        self.handover, self.before, self.policy, self.workload = handover, listener.box, policy, workload
        self._loop, self._effects, self._journal = listener, effects, journal
        self._now_s, self._config = clock, config
        self._released: dict[Holder, asyncio.Future[bool]] = {}
        self._skipped: set[Move] = set()
        self._errors: list[str] = []
        self._steps: dict[int, RunningStep] = {}
        self._seq = 0

    def begin(self, reason: str, asked_by: str, asked_for: str) -> None:
        """Write the journal record. Nothing else happens before this has returned."""
        loop = asyncio.get_running_loop()
        self._released = {move.holder: loop.create_future() for move in self.handover.moves if move.side == "free"}
        self._journal.begin(self.handover.id, reason, self._now_s(), asked_by, asked_for)

    async def run(self) -> None:
        """Carry out the moves and close the journal record."""
        states = set(await asyncio.gather(*map(self._move, self.handover.moves)))
        state: HandoverState = "failed" if "failed" in states else "done" if states <= {"done"} else "undone"
        self._journal.end(self.handover.id, state, self._now_s(), "; ".join(self._errors))

    @property
    def running_steps(self) -> tuple[RunningStep, ...]:
        """The steps in progress that are not being cancelled."""
        return tuple(step for step in self._steps.values() if not step.cancelled)

    def cancel(self, step: RunningStep, reason: str) -> None:
        """Undo a step in progress. Moves that wait for its holder to leave have ended when this returns: otherwise the
        devices would still look promised to them while the replica is open again."""
        step.cancelled = reason
        step.task.cancel()
        for move in self.handover.take if step.move.side == "free" else ():
            if step.move.holder in move.needs and move not in self._skipped:
                self._skipped.add(move)
                self._loop.move_ended(move, "skipped")

    # --- moves ----------------------------------------------------------------------------------------------------

    async def release_devices(self, move: Move) -> None:
        """The holder leaves its devices. Once it sleeps, is stopped or suspended, there is no way back."""
        holder = move.holder
        if holder.kind == "job":
            # A failed suspend leaves the group running, as it was before.
            await self._do(move, "suspend_group" if move.how == "suspend" else "stop_group", holder.id)
            self._loop.box = self._loop.box.without(holder)
        else:
            state = self._loop.box.replicas[holder.id].state
            try:
                if state in SERVING:
                    self._replica(holder.id, "draining")
                    await self._do(move, "drain_replica", holder.id)
                if move.how == "sleep":
                    await self._sleep_or_stop(move)
                else:
                    await self._do(move, "stop_replica", holder.id)
                    self._loop.box = self._loop.box.without(holder)
            except (EffectFailed, StepCancelled) as error:
                if state == "open" and await self._undo(error, move, "open_replica"):
                    self._replica(holder.id, "open")
                raise
        if move.devices:
            self._note(move, "release")

    async def _sleep_or_stop(self, move: Move) -> None:
        """An engine that cannot sleep must not keep its devices: ending its process frees them."""
        try:
            await self._do(move, "sleep_replica", move.holder.id)
            self._replica(move.holder.id, "asleep")
        except EffectFailed as error:
            if not await self._undo(error, move, "stop_replica"):
                raise
            self._loop.box = self._loop.box.without(move.holder)

    async def take_devices(self, move: Move) -> None:
        """The holder takes its devices: an engine wakes or starts and is opened, a job's ranks start."""
        self._acquire(move)
        holder, plan = move.holder, move.plan
        try:
            if plan is None:
                await self._do(move, "start_group", holder.id, move.devices, self._lease(move))
                self._enter_group(move)
            else:
                if move.how == "wake":
                    await self._do(move, "wake_replica", plan.id, plan.model, plan.version)
                else:
                    await self._do(move, "start_replica", plan)
                self._replica(plan.id, "ready", plan.version)
                await self._do(move, "open_replica", plan.id)
                self._replica(plan.id, "open")
        except (EffectFailed, StepCancelled) as error:
            # An engine is not put to sleep again: a process that failed to wake is not reused.
            if await self._undo(error, move, "stop_group" if plan is None else "stop_replica"):
                self._loop.box = self._loop.box.without(holder)
                self._note(move, "release")
            raise

    def _acquire(self, move: Move) -> None:
        """Enter the holder in the box. Raises EffectFailed if a device is gone, or held by another."""
        holders, plan = self._loop.box.holders, move.plan
        for device_id in move.devices:
            if device_id not in self._loop.box.devices:
                reason = f"device {device_id} is gone"
            elif holders.get(device_id, move.holder) != move.holder:
                reason = f"device {device_id} is still held by {holders[device_id]}"
            else:
                continue
            self._note(move, "acquire", "failed", {"error": reason})
            failure = EffectFailed(reason, "outside")
            failure.step = f"acquire {self._lease(move)}"
            raise failure
        if plan is None:
            self._enter_group(move)
        elif plan.id in self._loop.box.replicas:
            self._replica(plan.id, "starting")
        else:
            self._loop.box = self._loop.box.with_replica(replace(plan, state="starting", since_s=self._now_s()))
        self._note(move, "acquire")

    async def change_in_place(self, move: Move) -> None:
        """A replica takes another version, keeping its requests, and is open. No undo: an engine that fails to take it
        serves the old one or is dead."""
        plan = move.plan
        assert plan is not None
        if move.how == "swap":
            await self._do(move, "swap_replica", plan.id, plan.model, plan.version)
            changed = replace(self._loop.box.replicas[plan.id], version=plan.version)
            self._loop.box = self._loop.box.with_replica(changed)
        if self._loop.box.replicas[plan.id].state != "open":
            await self._do(move, "open_replica", plan.id)
            self._replica(plan.id, "open")

    def _lease(self, move: Move) -> str:
        """Names the holder's right to its devices in the history. Never used before."""
        return f"{self.handover.id}:{move.holder.kind}:{move.holder.id}"

    async def _move(self, move: Move) -> MoveState:
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
        except StepCancelled as cancelled:
            state = "cancelled" if cancelled.undone else "failed"
            self._errors.append(cancelled.reason)
        except EffectFailed as error:
            state, failure = "undone" if error.undone else "failed", error
            self._errors.append(f"{error.step}: {error.reason}")
        finally:
            if move.side == "free":
                self._released[move.holder].set_result(state == "done")
        if move not in self._skipped:
            self._loop.move_ended(move, state, failure)
        return state

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _undo(self, cause: EffectFailed | StepCancelled, move: Move, verb: str) -> bool:
        """Take back what came before the step that failed. True if that succeeded."""
        try:
            await self._do(move, verb, move.holder.id, undoes=cause.seq)
        except EffectFailed:
            cause.undone = False
            return False
        return True

    async def _do(self, move: Move, verb: str, *arguments: Any, undoes: int | None = None) -> None:
        """Run one step of a move within its time limit. Raises EffectFailed, or StepCancelled where `cancel` ended
        it."""
        limit_s, task = getattr(self._config, STEPS[verb][0]), asyncio.current_task()
        assert task is not None
        step = RunningStep(move, verb, self._now_s(), limit_s, task)
        record = StepRecord(
            self._seq, move.name, verb, move.holder.id, "doing", step.since_s, None, _detail(move, verb), undoes
        )
        self._seq += 1
        self._journal.step(self.handover.id, record)
        self._steps[record.seq] = step
        failure: EffectFailed | StepCancelled
        try:
            async with asyncio.timeout(limit_s):
                detail = await getattr(self._effects, verb)(*arguments)
        except EffectFailed as error:
            failure = error
        except TimeoutError:
            reason = f"took longer than its limit of {limit_s:g} s"
            failure = EffectFailed(reason, "own" if verb in _LOADS else "outside")
        except asyncio.CancelledError:
            if not step.cancelled or task.uncancel():  # the loop itself is ending
                raise
            failure = StepCancelled(step.cancelled)
        else:
            self._end(move, record, "done", detail)
            return self._loop.step_done(move, verb, self._now_s() - step.since_s, detail)
        finally:
            del self._steps[record.seq]
        failure.seq = record.seq
        if isinstance(failure, StepCancelled):
            self._end(move, record, "skipped", {"reason": failure.reason})
        else:
            failure.step = f"{verb} {move.holder.id}"
            self._end(move, record, "failed", {"error": failure.reason})
        raise failure

    def _note(self, move: Move, verb: str, state: StepState = "done", detail: Mapping[str, Any] | None = None) -> None:
        """Journal a step that takes no time: devices are in the books only."""
        devices = {"devices": list(move.devices)}
        record = StepRecord(self._seq, move.name, verb, self._lease(move), state, self._now_s(), None, devices)
        self._seq += 1
        self._end(move, record, state, detail)

    def _end(self, move: Move, record: StepRecord, state: StepState, detail: Mapping[str, Any] | None) -> None:
        merged = {**record.detail, **(detail or {})}
        self._journal.step(self.handover.id, replace(record, state=state, ended_s=self._now_s(), detail=merged))
        level = logging.WARNING if state == "failed" else logging.INFO
        if log.isEnabledFor(level):  # simulations run millions of steps
            ids = {"job_id" if move.holder.kind == "job" else "replica": move.holder.id}
            ids |= {key: merged[key] for key in ("model", "version") if key in merged}
            log.log(level, "%s %s: %s", record.verb, record.target, merged.get("error", state), extra=ids)

    def _enter_group(self, move: Move) -> None:
        group = GroupView(move.holder.id, move.devices, self._now_s(), run=self._lease(move))
        self._loop.box = self._loop.box.with_group(group)

    def _replica(self, replica_id: str, state: ReplicaState, version: str = "") -> None:
        """Enter the engine's new state, and version unless it is ""."""
        old = self._loop.box.replicas[replica_id]
        self._loop.box = self._loop.box.with_replica(
            replace(old, state=state, version=version or old.version, since_s=self._now_s())
        )


def _detail(move: Move, verb: str) -> dict[str, Any]:
    if verb == "start_group":
        return {"devices": list(move.devices)}
    if verb in _LOADS and move.plan is not None:
        return {"model": move.plan.model, "version": move.plan.version, "devices": list(move.devices)}
    return {}
