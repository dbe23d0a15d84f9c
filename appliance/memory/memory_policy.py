"""Decides what the box frees when host memory is short, and when it reverts that. Pure: takes a reading and a time, and
returns one action at a time.

Memory is short when less than the reserve plus the needs of engines with waiting requests is available, or when
processes stall on memory (PSI). The box then frees one item at a time, and checks the effect:

    1. idle weights in shared memory          unused segments, and versions without a reader that a lower tier has
    2. sleeping engines                       least recently used first; their next start is cold
    3. training, last in the queue first      suspended to shared memory; once its snapshot is copied from there
                                              to disk, (1) frees the snapshot too

Awake engines are never stopped, and no job starts meanwhile. A job that waits for memory gets what 1 and 2 free. Items
are restored in reverse order, one at a time, each after memory was clearly above the reserve for CALM_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.devices.host_reading import MemoryReading

Kind = Literal["idle", "sleeper", "job"]

ENOUGH_OF_RESERVE = 1.5
STALLED_PERCENT = 10.0
"""Share of the last ten seconds in which all processes stalled on memory, from which memory is short if less than 1.5 x
the reserve is available."""
CALM_S = 30.0
LEAST_BYTES = 4 * 2**20
"""Smaller amounts are not worth freeing."""
SETTLE_S: Mapping[Kind, float] = {"idle": 0.5, "sleeper": 2.0, "job": 5.0}
"""Time to wait for an action's effect."""
SUSPEND_LIMIT_S = 60.0
"""Longest wait for a job that is being suspended."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Memory that could be freed now, and demand. idle: bytes of idle weights. sleepers: sleeping engines. running:
    jobs with ranks, in the order in which they yield. wanted: bytes that engines with waiting requests need.
    job_wanted: bytes that the first waiting job needs."""

    idle: int = 0
    sleepers: int = 0
    running: tuple[str, ...] = ()
    wanted: int = 0
    job_wanted: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """back: restore the item instead of freeing it. job: a job's id, or "". nbytes: to free. why: text for users."""

    kind: Kind
    back: bool
    why: str
    job: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """State between decisions. short: why memory is short, "" if it is not. sleepers: limit of sleeping engines, None:
    no limit. jobs: jobs suspended for memory, in order of suspension. next_s: earliest time of the next action.
    calm_since_s: since when there is enough memory."""

    short: str = ""
    sleepers: int | None = None
    jobs: tuple[str, ...] = ()
    next_s: float = 0.0
    calm_since_s: float | None = None
    suspended_s: float = float("-inf")

    @property
    def holds_back(self) -> bool:
        """Whether memory is short now, or a lack of memory still holds back engines or jobs."""
        return bool(self.short) or self.sleepers is not None or bool(self.jobs)


def decide(
    reading: MemoryReading, holdings: Holdings, state: MemoryState, now_s: float, reserve: int
) -> tuple[MemoryState, Action | None]:
    """Return the new state and the action to take now, if any."""
    enough = int(reserve * ENOUGH_OF_RESERVE) + holdings.wanted
    state = replace(state, short=_short(reading, holdings, reserve))
    if state.short:
        lacking, why = enough - reading.available, f"memory is short, {state.short}"
        state = replace(state, calm_since_s=None)
    else:
        lacking = holdings.job_wanted + reserve - reading.available
        why = f"a job waits for {gb(holdings.job_wanted)} on top of the reserve of {gb(reserve)}, {_have(reading)}"
    if state.short or (holdings.job_wanted and lacking > 0):
        if now_s < state.next_s:
            return state, None
        if (decision := _give_up(holdings, state, lacking, now_s, why)) is not None:
            state, action = decision
            return replace(state, next_s=now_s + SETTLE_S[action.kind]), action
        if state.short or not state.jobs:
            return state, None
        # A waiting job that needs more than can be freed must not block the return of a suspended job.
    if not state.holds_back or reading.available < enough:
        return replace(state, calm_since_s=None), None
    if state.calm_since_s is None:
        return replace(state, calm_since_s=now_s), None
    if now_s - state.calm_since_s < CALM_S:
        return state, None
    state = replace(state, calm_since_s=now_s)  # wait for this item's effect before the next one
    if state.jobs:
        job = state.jobs[-1]  # the last suspended job is the first in the queue
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
        need = f"engines with waiting requests need {gb(holdings.wanted)} on top of the reserve of {gb(reserve)}"
        return f"{_have(reading)}, {need}"
    return ""


def _give_up(
    holdings: Holdings, state: MemoryState, lacking: int, now_s: float, why: str
) -> tuple[MemoryState, Action] | None:
    """Return the new state and the action that frees the next item; None if no item is left, or a job is still being
    suspended. Jobs are suspended only while memory is short."""
    if holdings.idle >= LEAST_BYTES:
        freed = min(max(LEAST_BYTES, lacking), holdings.idle)
        return state, Action("idle", False, f"idle weights leave shared memory ({gb(freed)}): {why}", nbytes=freed)
    if holdings.sleepers and (state.sleepers is None or state.sleepers >= holdings.sleepers):
        state = replace(state, sleepers=holdings.sleepers - 1)
        return state, Action("sleeper", False, f"a sleeping engine is stopped: {why}")
    staying = [job for job in holdings.running if job not in state.jobs]
    is_leaving = len(staying) < len(holdings.running) and now_s - state.suspended_s < SUSPEND_LIMIT_S
    if not state.short or is_leaving or not staying:
        return None
    job = staying[0]
    state = replace(state, jobs=(*state.jobs, job), suspended_s=now_s)
    return state, Action("job", False, f"job {job} is suspended: {why}", job)


def gb(count: int) -> str:
    """Format a size for users: 1,234,567,890 bytes are "1.2 GB"."""
    return f"{count / 1e9:.1f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"
