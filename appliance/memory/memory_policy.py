"""Decides what the box gives up when host memory is short, and when it takes it back. Pure: the input is a reading and
a time, the output one action at a time.

Memory is short when less than the reserve is available, whoever uses the rest, when engines with waiting requests need
more than there is, or when processes stall for lack of it (PSI). The box then gives up one item at a time and checks
the effect before the next:

    1. freed segments of the weights pool     nobody uses them
    2. versions that nobody reads             a lower tier has them; reading one in again takes seconds
    3. sleeping engines                       least recently used first; their next start is a cold one
    4. parked ranks                           their job starts with new processes
    5. training, last in the queue first      suspended to shared memory; once its snapshot is copied from there
                                              to disk, (2) frees the snapshot too
    6. engines beyond the first of a model    the last one is never stopped

A job that waits for memory gets what 1 to 4 bring, and never what others compute with.

It takes back in the other order, one thing after the other, once there has been clearly more than the reserve for a
while; that while doubles each time that training was taken for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from scheduler.core.memory_reading import MemoryReading

Kind = Literal["pool", "versions", "sleeper", "parked", "job", "engine"]

SHORT_OF_RESERVE, ENOUGH_OF_RESERVE = 1.0, 1.5
STALLED_PERCENT = 10.0
"""Share of the last ten seconds in which every process stalled on memory; above it, and with less than enough
available, memory is short."""
CALM_S, LONGEST_CALM_S, FORGIVEN_AFTER_S = 10.0, 300.0, 1800.0
LEAST_BYTES = 4 * 2**20
"""Smaller amounts are not worth giving up."""
SETTLE_S: Mapping[Kind, float] = {
    "pool": 0.5,
    "versions": 0.5,
    "sleeper": 2.0,
    "parked": 1.0,
    "job": 5.0,
    "engine": 10.0,
}
"""Time to wait after each action for its effect. A job that is still being suspended is waited for, up to its limit."""
SUSPEND_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the box could give back now. sleepers: sleeping engines. running: jobs with ranks, first to yield first.
    spare: awake engines by model, for models with more than one. wanted: bytes that engines need for which somebody
    waits. job_wanted: bytes that the first job needs that waits for memory."""

    pool: int = 0
    versions: int = 0
    sleepers: int = 0
    parked: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    spare: Mapping[str, int] = field(default_factory=dict)
    wanted: int = 0
    job_wanted: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """what: the job, the model, or "". bound: allowed number of sleepers, or of the model's engines. why: for users."""

    kind: Kind
    back: bool
    why: str
    what: str = ""
    bound: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The hysteresis. short: why memory is short, "" if it is not. sleepers: allowed number, None: unlimited. jobs:
    those suspended for memory, in order of suspension. engines: allowed number by model. next_s: earliest time of the
    next action. calm_since_s: since when enough is available."""

    short: str = ""
    sleepers: int | None = None
    jobs: tuple[str, ...] = ()
    engines: Mapping[str, int] = field(default_factory=dict)
    since_s: float | None = None
    next_s: float = 0.0
    calm_since_s: float | None = None
    calm_s: float = CALM_S
    suspended_s: float = float("-inf")
    back_s: float = float("-inf")

    @property
    def holds_back(self) -> bool:
        """Whether something of the box is still held back for memory, or memory is short now."""
        return bool(self.short) or self.sleepers is not None or bool(self.jobs) or bool(self.engines)


def default_reserve(total: int) -> int:
    """Bytes kept available for other processes: a twenty-fifth of the total, at least half a GiB, at most eight."""
    return min(max(total // 25, 2**29), 8 * 2**30)


def decide(
    reading: MemoryReading, holdings: Holdings, state: MemoryState, now_s: float, reserve: int
) -> tuple[MemoryState, Action | None]:
    """The action to take now, if any, and the new state."""
    short = _short(reading, holdings, reserve)
    if short:
        since_s = now_s if state.since_s is None else state.since_s
        state = replace(state, short=short, since_s=since_s, calm_since_s=None)
        if now_s < state.next_s:
            return state, None
        return _give(reading, holdings, state, now_s, reserve)
    state = replace(state, short="", since_s=None)
    lacking = holdings.job_wanted + reserve - reading.available
    if holdings.job_wanted and lacking > 0:
        if now_s < state.next_s:
            return state, None
        why = (
            f"a job waits for {gb(holdings.job_wanted)} besides the reserve of {gb(reserve)}, "
            f"{gb(reading.available)} of {reading.where} available"
        )
        return _give_idle(holdings, state, now_s, max(LEAST_BYTES, lacking), why) or (state, None)
    if not state.holds_back:
        return replace(state, calm_since_s=None), None
    if reading.available < int(reserve * ENOUGH_OF_RESERVE) + holdings.wanted:
        return replace(state, calm_since_s=None), None
    if state.calm_since_s is None:
        return replace(state, calm_since_s=now_s), None
    if now_s - state.calm_since_s < state.calm_s:
        return state, None
    return _take(reading, state, now_s)


def _short(reading: MemoryReading, holdings: Holdings, reserve: int) -> str:
    have = f"{gb(reading.available)} of {reading.where} available"
    if reading.available < int(reserve * SHORT_OF_RESERVE):
        return f"{have}, {gb(reserve)} are kept in reserve"
    if reading.stalled >= STALLED_PERCENT and reading.available < int(reserve * ENOUGH_OF_RESERVE):
        return f"{have}, and processes stalled on memory for {reading.stalled:.0f} % of the last ten seconds"
    if holdings.wanted and reading.available < reserve + holdings.wanted:
        return f"{have}, engines with waiting requests need {gb(holdings.wanted)} besides the reserve of {gb(reserve)}"
    return ""


def _give(
    reading: MemoryReading, holdings: Holdings, state: MemoryState, now_s: float, reserve: int
) -> tuple[MemoryState, Action | None]:
    lacking = max(LEAST_BYTES, int(reserve * ENOUGH_OF_RESERVE) + holdings.wanted - reading.available)
    why = f"memory is short, {state.short}"
    if (idle := _give_idle(holdings, state, now_s, lacking, why)) is not None:
        return idle
    act = partial(_act, state, now_s, why)
    leaving = [job for job in holdings.running if job in state.jobs]
    if leaving and now_s - state.suspended_s < SUSPEND_LIMIT_S:
        return state, None
    if staying := [job for job in holdings.running if job not in state.jobs]:
        calm_s = state.calm_s
        if now_s - state.back_s < FORGIVEN_AFTER_S:
            calm_s = min(2 * calm_s, LONGEST_CALM_S)  # it resumed a while ago, and that was too soon
        changed = replace(state, jobs=(*state.jobs, staying[0]), suspended_s=now_s, calm_s=calm_s, back_s=float("-inf"))
        return act("job", f"job {staying[0]} is suspended", changed, what=staying[0])
    for model, awake in sorted(holdings.spare.items()):
        if awake > 1 and state.engines.get(model, awake) >= awake:
            changed = replace(state, engines={**state.engines, model: awake - 1})
            return act("engine", f"{model} keeps {awake - 1} of {awake} engines", changed, what=model, bound=awake - 1)
    return state, None


def _give_idle(
    holdings: Holdings, state: MemoryState, now_s: float, lacking: int, why: str
) -> tuple[MemoryState, Action] | None:
    """What nobody computes with; None when nothing of it is left."""
    act = partial(_act, state, now_s, why)
    if holdings.pool >= LEAST_BYTES:
        return act("pool", f"{gb(holdings.pool)} of freed segments are given back", nbytes=holdings.pool)
    if holdings.versions >= LEAST_BYTES:
        freed = min(lacking, holdings.versions)
        return act("versions", f"versions that nobody reads leave shared memory ({gb(freed)})", nbytes=freed)
    if holdings.sleepers and (state.sleepers is None or state.sleepers >= holdings.sleepers):
        bound = holdings.sleepers - 1
        return act("sleeper", "a sleeping engine is ended", replace(state, sleepers=bound), bound=bound)
    if holdings.parked:
        return act("parked", f"parked ranks of {', '.join(holdings.parked)} are ended")
    return None


def _act(
    state: MemoryState,
    now_s: float,
    why: str,
    kind: Kind,
    what_is_done: str,
    changed: MemoryState | None = None,
    **fields: Any,
) -> tuple[MemoryState, Action]:
    action = Action(kind, False, f"{what_is_done}: {why}", **fields)
    return replace(changed or state, next_s=now_s + SETTLE_S[kind]), action


def _take(reading: MemoryReading, state: MemoryState, now_s: float) -> tuple[MemoryState, Action | None]:
    """Restore one item. Then a new calm period begins, so that the item's memory use shows before the next one."""
    has = f"{gb(reading.available)} of {reading.where} are available again"
    after = replace(state, calm_since_s=now_s, next_s=now_s)
    if state.engines:
        model = max(state.engines)
        rest = {name: bound for name, bound in state.engines.items() if name != model}
        return replace(after, engines=rest), Action("engine", True, f"{model} may have all its engines: {has}", model)
    if state.jobs:
        job = state.jobs[-1]  # the job suspended last is first in the queue
        calm_s = state.calm_s if now_s - state.suspended_s < FORGIVEN_AFTER_S else CALM_S
        after = replace(after, jobs=state.jobs[:-1], back_s=now_s, calm_s=calm_s)
        return after, Action("job", True, f"job {job} may continue: {has}", job)
    return replace(after, sleepers=None), Action("sleeper", True, f"engines may sleep as before: {has}")


def without(state: MemoryState, *, jobs: Iterable[str], models: Iterable[str]) -> MemoryState:
    """The state without jobs that have ended and models that are no longer served."""
    known_jobs, known_models = set(jobs), set(models)
    return replace(
        state,
        jobs=tuple(job for job in state.jobs if job in known_jobs),
        engines={model: bound for model, bound in state.engines.items() if model in known_models},
    )


def gb(count: int) -> str:
    """The size as shown to users: 1,234,567,890 bytes are "1.2 GB"."""
    return f"{count / 1e9:.1f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"
