"""Decides what the box gives up when host memory is short, and when it takes it back. Pure: the input is a reading and
a time, the output one action at a time.

Memory is short when less than the reserve is available, when engines with waiting requests need more than there is, or
when processes stall for lack of it (PSI). The box then gives up one item at a time, and checks the effect of each:

    1. idle weights in shared memory          freed segments, and versions without a reader that a lower tier has
    2. sleeping engines                       least recently used first; their next start is a cold one
    3. training, last in the queue first      suspended to shared memory; once its snapshot is copied from there
                                              to disk, (1) frees the snapshot too

No awake engine is stopped, and no job begins meanwhile. A job that waits for memory gets what 1 and 2 bring. Items come
back in the other order, one at a time, each after memory was clearly above the reserve for CALM_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.devices.host_reading import MemoryReading

Kind = Literal["idle", "sleeper", "job"]

ENOUGH_OF_RESERVE = 1.5
STALLED_PERCENT = 10.0
"""Share of the last ten seconds in which every process stalled on memory; above it, and with less than enough
available, memory is short."""
CALM_S = 30.0
LEAST_BYTES = 4 * 2**20
"""Smaller amounts are not worth giving up."""
SETTLE_S: Mapping[Kind, float] = {"idle": 0.5, "sleeper": 2.0, "job": 5.0}
"""Time to wait after each action for its effect."""
SUSPEND_LIMIT_S = 60.0
"""A job that is still being suspended is waited for, up to this."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Memory the box could give back now. idle: bytes of idle weights. sleepers: sleeping engines. running: jobs with
    ranks, first to yield first. wanted: bytes that engines need for which requests wait. job_wanted: bytes that the
    first job needs that waits for memory."""

    idle: int = 0
    sleepers: int = 0
    running: tuple[str, ...] = ()
    wanted: int = 0
    job_wanted: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """back: the box takes the item back. job: its id, or "". nbytes: to free. why: for users."""

    kind: Kind
    back: bool
    why: str
    job: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The hysteresis. short: why memory is short, "" if it is not. sleepers: allowed number, None: unlimited. jobs:
    those suspended for memory, in order of suspension. next_s: earliest time of the next action. calm_since_s: since
    when enough is available."""

    short: str = ""
    sleepers: int | None = None
    jobs: tuple[str, ...] = ()
    next_s: float = 0.0
    calm_since_s: float | None = None
    suspended_s: float = float("-inf")

    @property
    def holds_back(self) -> bool:
        """Whether something of the box is still held back for memory, or memory is short now."""
        return bool(self.short) or self.sleepers is not None or bool(self.jobs)


def decide(
    reading: MemoryReading, holdings: Holdings, state: MemoryState, now_s: float, reserve: int
) -> tuple[MemoryState, Action | None]:
    """The action to take now, if any, and the new state."""
    enough = int(reserve * ENOUGH_OF_RESERVE) + holdings.wanted
    state = replace(state, short=_short(reading, holdings, reserve))
    if state.short:
        lacking, why = enough - reading.available, f"memory is short, {state.short}"
        state = replace(state, calm_since_s=None)
    else:
        lacking = holdings.job_wanted + reserve - reading.available
        why = f"a job waits for {gb(holdings.job_wanted)} besides the reserve of {gb(reserve)}, {_have(reading)}"
    if state.short or (holdings.job_wanted and lacking > 0):
        if now_s < state.next_s:
            return state, None
        if (decision := _give_up(holdings, state, lacking, now_s, why)) is not None:
            state, action = decision
            return replace(state, next_s=now_s + SETTLE_S[action.kind]), action
        if state.short or not state.jobs:
            return state, None
        # A job that waits for more than there is must not keep a suspended one from its memory.
    if not state.holds_back or reading.available < enough:
        return replace(state, calm_since_s=None), None
    if state.calm_since_s is None:
        return replace(state, calm_since_s=now_s), None
    if now_s - state.calm_since_s < CALM_S:
        return state, None
    state = replace(state, calm_since_s=now_s)  # its use shows before the next item
    if state.jobs:
        job = state.jobs[-1]  # the job suspended last is first in the queue
        why = f"job {job} may continue: {_have(reading)} again"
        return replace(state, jobs=state.jobs[:-1]), Action("job", True, why, job)
    return replace(state, sleepers=None), Action("sleeper", True, f"engines may sleep as before: {_have(reading)}")


def _have(reading: MemoryReading) -> str:
    return f"{gb(reading.available)} of {reading.where} available"


def _short(reading: MemoryReading, holdings: Holdings, reserve: int) -> str:
    if reading.available < reserve:
        return f"{_have(reading)}, {gb(reserve)} are kept in reserve"
    if reading.stalled >= STALLED_PERCENT and reading.available < int(reserve * ENOUGH_OF_RESERVE):
        return f"{_have(reading)}, processes stalled on memory for {reading.stalled:.0f} % of the last ten seconds"
    if holdings.wanted and reading.available < reserve + holdings.wanted:
        need = f"engines with waiting requests need {gb(holdings.wanted)} besides the reserve of {gb(reserve)}"
        return f"{_have(reading)}, {need}"
    return ""


def _give_up(
    holdings: Holdings, state: MemoryState, lacking: int, now_s: float, why: str
) -> tuple[MemoryState, Action] | None:
    """The next item to give up; None when nothing is left, or a job is still being suspended. Training is suspended
    only while memory is short."""
    if holdings.idle >= LEAST_BYTES:
        freed = min(max(LEAST_BYTES, lacking), holdings.idle)
        return state, Action("idle", False, f"idle weights leave shared memory ({gb(freed)}): {why}", nbytes=freed)
    if holdings.sleepers and (state.sleepers is None or state.sleepers >= holdings.sleepers):
        state = replace(state, sleepers=holdings.sleepers - 1)
        return state, Action("sleeper", False, f"a sleeping engine is ended: {why}")
    staying = [job for job in holdings.running if job not in state.jobs]
    is_leaving = len(staying) < len(holdings.running) and now_s - state.suspended_s < SUSPEND_LIMIT_S
    if not state.short or is_leaving or not staying:
        return None
    job = staying[0]
    state = replace(state, jobs=(*state.jobs, job), suspended_s=now_s)
    return state, Action("job", False, f"job {job} is suspended: {why}", job)


def gb(count: int) -> str:
    """The size as shown to users: 1,234,567,890 bytes are "1.2 GB"."""
    return f"{count / 1e9:.1f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"
