"""Executes a hand-over: runs its chains concurrently, journals each step before and after, undoes failures.

Knows nothing of planning. The loop passes the box that the runner updates, and hears from it how each chain ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed, StepCancelled
from scheduler.core.inventory import Holder
from scheduler.handover.box import Box
from scheduler.handover.effects import Effects
from scheduler.handover.handover import Chain, Handover
from scheduler.handover.journal import HandoverRecord, HandoverState, Journal, StepRecord, StepState
from scheduler.handover.ports import Clock
from scheduler.handover.step import Step
from scheduler.handover.verbs import VERBS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """done: the wanted state was reached. undone: rolled back to the previous state. failed: an undo or a release
    failed too. skipped: the chain never began. cancelled: rolled back because the plan changed, which is not a failure.

    `reason`: the verb's error message. `blame`: what the failure is attributed to. `of_settings`: see EffectFailed.
    """

    chain: Chain
    state: Literal["done", "undone", "failed", "skipped", "cancelled"]
    error: str = ""
    reason: str = ""
    blame: Blame = "own"
    of_settings: bool = False


class ChainListener(Protocol):
    """What the runner needs from the loop. `box` is replaced, never changed in place."""

    box: Box

    def unwanted(self, chain: Chain) -> str:
        """Why a chain that is about to take devices should no longer do so; empty if it should."""

    def step_done(self, step: Step, took_s: float) -> None: ...

    def chain_ended(self, end: ChainEnd) -> None: ...


@dataclass(frozen=True, slots=True)
class Doing:
    """A step in progress since `since_s`, which fails when it takes longer than `limit_s`."""

    step: Step
    since_s: float
    limit_s: float


@dataclass(slots=True)
class _Cancellable:
    """A drain or a start of ranks in progress: the task that waits for it, and the reason if it is cancelled."""

    task: asyncio.Task[Any]
    off: str = ""


class Runner:
    """One hand-over. `run` returns when every chain has ended; it raises only for bugs."""

    def __init__(
        self,
        handover: Handover,
        reason: str,
        *,
        asked_by: str,
        asked_for: str,
        listener: ChainListener,
        effects: Effects,
        journal: Journal,
        clock: Clock,
        config: SchedulerConfig,
    ):
        self.handover, self.reason = handover, reason
        self._asked_by, self._asked_for = asked_by, asked_for
        self._listener, self._effects, self._journal = listener, effects, journal
        self._clock, self._config = clock, config
        self._released: dict[str, asyncio.Future[bool]] = {}
        self._cancellable: dict[Holder, _Cancellable] = {}
        self._over: set[int] = set()
        self._doing: dict[int, Doing] = {}
        self._taken: dict[Holder, asyncio.Event] = {chain.holder: asyncio.Event() for chain in handover.take}
        self._seq = 0

    def begin(self) -> None:
        """Write the journal record. Nothing else happens before this has returned."""
        self._steps: dict[int, list[StepRecord]] = {}
        for n, chain in enumerate(self.handover.chains):
            self._steps[n] = [self._record(chain, step) for step in chain.steps]
        loop = asyncio.get_running_loop()
        for chain in self.handover.free:
            for step in chain.steps:
                if step.verb == "release":
                    self._released[step.target] = loop.create_future()
        self._journal.begin(
            HandoverRecord(
                id=self.handover.id,
                reason=self.reason,
                state="running",
                started_s=self._clock.now_s(),
                steps=tuple(r for records in self._steps.values() for r in records),
                asked_by=self._asked_by,
                asked_for=self._asked_for,
            )
        )

    async def run(self) -> HandoverState:
        ends = await asyncio.gather(*(self._chain(n, c) for n, c in enumerate(self.handover.chains)))
        states = {end.state for end in ends}
        state: HandoverState = "failed" if "failed" in states else "done" if states <= {"done"} else "undone"
        errors = "; ".join(end.error for end in ends if end.error and end.state != "skipped")
        self._journal.end(self.handover.id, state, self._clock.now_s(), errors)
        return state

    @property
    def doing(self) -> tuple[Doing, ...]:
        """The steps in progress."""
        return tuple(self._doing.values())

    # --- cancelling -----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> tuple[Holder, ...]:
        """Holders whose drain is in progress and can be cancelled."""
        return tuple(holder for holder, one in self._cancellable.items() if holder.kind == "replica" and not one.off)

    @property
    def starting(self) -> tuple[Doing, ...]:
        """Starts of jobs' ranks that are in progress and can be cancelled."""
        left = {holder.id for holder, one in self._cancellable.items() if holder.kind == "job" and not one.off}
        starts = (doing for doing in self._doing.values() if doing.step.verb == "start_group")
        return tuple(doing for doing in starts if doing.step.target in left)

    def cancel_start(self, job_id: str, reason: str) -> None:
        """Undo a start in progress: its ranks are stopped, and its devices released."""
        one = self._cancellable[Holder("job", job_id)]
        one.off = reason
        one.task.cancel()

    def cancel_drain(self, holder: Holder, reason: str) -> None:
        """Undo a drain in progress. Chains that wait for its lease have ended when this returns: otherwise the devices
        would still look promised to them while the replica is open again."""
        drain = self._cancellable[holder]
        drain.off = reason
        drain.task.cancel()
        given = {s.target for c in self.handover.free if c.holder == holder for s in c.steps if s.verb == "release"}
        for n, chain in enumerate(self.handover.chains):
            if n not in self._over and not chain.needs.isdisjoint(given):
                self._over.add(n)
                self._listener.chain_ended(self._skip(chain, self._steps[n], reason))

    @contextlib.contextmanager
    def _until_cancelled(self, step: Step) -> Iterator[None]:
        """While a drain or a start of ranks runs inside, `cancel_drain` or `cancel_start` ends it so."""
        if step.verb not in ("drain_replica", "start_group"):
            yield
            return
        kind: Literal["replica", "job"] = "replica" if step.verb == "drain_replica" else "job"
        holder, task = Holder(kind, step.target), asyncio.current_task()
        assert task is not None
        one = self._cancellable[holder] = _Cancellable(task)
        try:
            yield
        except asyncio.CancelledError:
            if one.off and task.uncancel() == 0:  # else the loop itself is ending, or the time limit passed
                raise StepCancelled(one.off) from None
            raise
        finally:
            del self._cancellable[holder]

    # --- chains -------------------------------------------------------------------------------------------------

    def _skip(self, chain: Chain, records: list[StepRecord], reason: str) -> ChainEnd:
        for record in records:
            self._write(replace(record, state="skipped", detail={"reason": reason}))
        return ChainEnd(chain, "skipped", reason)

    async def _chain(self, n: int, chain: Chain) -> ChainEnd:
        try:
            end = await self._walk(n, chain, self._steps[n])
        finally:
            for step in chain.steps:
                future = self._released.get(step.target) if chain.side == "free" else None
                if future is not None and not future.done():
                    future.set_result(False)
            if chain.side == "take":
                self._taken[chain.holder].set()
        if n not in self._over:
            self._listener.chain_ended(end)
        return end

    async def _walk(self, n: int, chain: Chain, records: list[StepRecord]) -> ChainEnd:
        missing = [lease for lease in sorted(chain.needs) if lease not in self._released]
        assert not missing, f"{chain.name} needs leases that no chain releases: {missing}"
        for lease_id in chain.needs:
            await asyncio.shield(self._released[lease_id])
        for holder in chain.after:
            await self._taken[holder].wait()
        if n in self._over:
            return ChainEnd(chain, "skipped")
        late = [lease for lease in sorted(chain.needs) if not self._released[lease].result()]
        off = f"lease {late[0]} was not released" if late else self._listener.unwanted(chain)
        if off:
            return self._skip(chain, records, off)

        undoable: list[Step] = []
        for at, (step, record) in enumerate(zip(chain.steps, records, strict=True)):
            try:
                await self._with_patience(step, record)
            except StepCancelled as off_:
                self._skip(chain, records[at + 1 :], off_.reason)
                back = [u for s in reversed([*undoable, step]) for u in s.undo]
                clean = await self._undo(chain, back, record.seq)
                return ChainEnd(chain, "cancelled" if clean else "failed", off_.reason)
            except EffectFailed as error:
                if step.force and await self._undo(chain, step.force, record.seq):
                    undoable.clear()
                    continue
                for later in records[at + 1 :]:
                    self._write(replace(later, state="skipped"))
                back = [u for s in reversed([*undoable, step]) for u in s.undo]
                clean = await self._undo(chain, back, record.seq) and step.verb != "release" and not step.force
                return ChainEnd(
                    chain,
                    "undone" if clean else "failed",
                    str(error),
                    error.reason,
                    error.blame,
                    error.of_settings,
                )
            if VERBS[step.verb].no_return:
                undoable.clear()
            else:
                undoable.append(step)
        return ChainEnd(chain, "done")

    async def _with_patience(self, step: Step, record: StepRecord) -> None:
        """A release has no undo and other chains wait for it, so it is tried several times."""
        attempts = self._config.release_attempts if step.verb == "release" else 1
        for attempt in range(attempts - 1):
            try:
                return await self._step(step, record)
            except EffectFailed:
                await asyncio.sleep(min(self._config.backoff_first_s * 2.0**attempt, self._config.backoff_max_s))
        await self._step(step, record)

    async def _undo(self, chain: Chain, steps: list[Step] | tuple[Step, ...], undoes: int) -> bool:
        """Run every step of an undo even if others fail. True if all succeeded."""
        clean = True
        for step in steps:
            record = replace(self._record(chain, step), undoes=undoes)
            try:
                await self._with_patience(step, record)
            except EffectFailed:
                clean = False
        return clean

    # --- steps --------------------------------------------------------------------------------------------------

    async def _step(self, step: Step, record: StepRecord) -> None:
        started_s, verb = self._clock.now_s(), VERBS[step.verb]
        record = replace(record, state="doing", started_s=started_s)
        if refused := verb.refusal(step, self._listener.box):
            self._write(replace(record, state="failed", ended_s=started_s, detail={**record.detail, "error": refused}))
            raise EffectFailed(step.verb, step.target, refused, "outside")
        self._write(record)
        self._listener.box = verb.begun(step, self._listener.box, started_s)
        limit_s = verb.limit_s(self._config)
        self._doing[record.seq] = Doing(step, started_s, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                with self._until_cancelled(step):
                    detail = await verb.perform(self._effects, step)
        except StepCancelled as off:
            self._ended(record, "skipped", {"reason": off.reason})
            raise
        except EffectFailed as error:
            self._ended(record, "failed", {"error": error.reason})
            _tell(step, error.reason)
            if verb.blames == "box":
                raise EffectFailed(step.verb, step.target, error.reason, "outside") from error
            raise
        except TimeoutError:
            reason = f"took longer than its limit of {limit_s:g} s"
            self._ended(record, "failed", {"error": reason})
            _tell(step, reason)
            blame: Blame = "own" if verb.blames == "engine" else "outside"
            raise EffectFailed(step.verb, step.target, reason, blame) from None
        finally:
            self._doing.pop(record.seq, None)
        ended_s = self._clock.now_s()
        self._listener.box = verb.done(step, self._listener.box, ended_s)
        self._ended(record, "done", detail)
        _tell(step)
        self._listener.step_done(step, ended_s - started_s)
        future = self._released.get(step.target) if step.verb == "release" else None
        if future is not None and not future.done():
            future.set_result(True)

    def _record(self, chain: Chain, step: Step) -> StepRecord:
        detail: dict[str, Any] = {}
        if step.version:
            detail = {"model": step.model, "version": step.version}
        if step.lease is not None:
            detail["devices"] = list(step.lease.device_ids)
        self._seq += 1
        return StepRecord(self._seq - 1, chain.name, step.verb, step.target, detail=detail)

    def _ended(self, record: StepRecord, state: StepState, detail: Mapping[str, Any] | None) -> None:
        merged = {**record.detail, **(detail or {})}
        self._write(replace(record, state=state, ended_s=self._clock.now_s(), detail=merged))

    def _write(self, record: StepRecord) -> None:
        self._journal.step(self.handover.id, record)


def _tell(step: Step, error: str = "") -> None:
    """Log a step that ended, with the ids of its targets."""
    level = logging.WARNING if error else logging.INFO
    if not log.isEnabledFor(level):
        return  # simulations run millions of steps
    target = VERBS[step.verb].target
    ids = {"job_id" if target == "job" else target: step.target} if target else {}
    if step.lease is not None:
        ids = {"job_id" if step.lease.holder.kind == "job" else "replica": step.lease.holder.id}
        ids["lease_id"] = step.lease.id
    ids |= {"model": step.model, "version": step.version}
    log.log(level, "%s %s: %s", step.verb, step.target, error or "done", extra=ids)
