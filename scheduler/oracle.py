"""An upper bound on what any scheduler could have trained, knowing the future and paying the same switching times.

The oracle is an offline optimum, found by dynamic programming over time, of a relaxed problem. Every run of the real
scheduler is a feasible point of that problem, so no run can train more at no lower attainment.

Kept (what no scheduler can escape):

1. Whole devices. At each moment the job trains on m devices and at most N - m serve.
2. Switching. From one size of the job to another its ranks stop and start again; a device that changes sides is of use
   to neither until it is suspended, leased and awake (or asleep, leased and started). Times are those of `VerbTimes`.
   With a list of jobs only the devices that move pay, since other jobs need not notice.
3. Work and targets. A request needs at least the device time that the engine model charges its tokens in the fullest
   possible batch. The work served up to any moment is at least that of the requests due by then, and at most that of
   the requests that have arrived. A prompt is due `slo_ttft_s` after the arrival, a whole request when its last token
   is. Requests may be missed, as many as the run it is compared with missed: the oracle picks those that gain it most
   (a price per miss, minimised over: Lagrange's bound).
4. Memory. A request that has its first token lies in the KV cache of a serving device until its last. So the work left
   of all that came longer than `slo_ttft_s` ago is no more than what the caches hold, filled with the requests that
   have most work per token of cache.

Relaxed (costs the oracle nothing): draining; the size of real batches and their unevenness over engines; a single
request is worked on by all devices at once; order of service beyond the rule above; everything that a grid of `step_s`
cannot see (arrivals count from the beginning of a step, deadlines at its end, work is rounded in the oracle's favour
on its running sum, so that roundings do not add up, and a switch gains the larger side for the whole step).

Two bounds are computed, one from prompts alone with their short deadlines, one from whole requests. The one that is
lower when nothing may be missed is the bound; missed requests are priced in it alone.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numba
import numpy as np

from scheduler.sim_engine import EngineModel
from scheduler.sim_trace import Requests, TraceJob
from scheduler.sim_world import VerbTimes

_NONE = -1e18
_LEVELS = 200
"""Resolution of the work served ahead of its deadlines: finer gives a tighter bound, and takes longer."""
_SEARCH_LEVELS = 24
"""The same while the price of a miss is searched: every price gives a bound, so the search may be coarse."""
_PRICE_TRIALS = 4
_CACHE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class _Switching:
    """Device seconds lost per device: `rest` stays with the job, `leave` goes to serving, `come` goes to training,
    `begin` trains from the first moment on. The elastic job runs when the trace begins, listed ones are submitted then.
    """

    rest_s: float
    leave_s: float
    come_s: float
    begin_s: float

    @classmethod
    def of(cls, times: VerbTimes, *, whole_job: bool) -> _Switching:
        again_s = times.suspend_s + times.start_group_s + times.lease_s
        return cls(
            rest_s=again_s if whole_job else 0.0,
            leave_s=times.suspend_s + times.lease_s + min(times.wake_s, times.start_s) + times.open_s,
            come_s=times.sleep_s + times.lease_s + times.start_group_s,
            begin_s=0.0 if whole_job else times.start_group_s,
        )

    @property
    def shortest_s(self) -> float:
        """No two changes of size are nearer to each other than this."""
        return max(min(self.leave_s, self.come_s) / 2, 0.05)


@dataclass(frozen=True, slots=True)
class _Requests:
    """The trace as arrays, and what they are held against. `tokens`: cache that each takes."""

    model: EngineModel
    devices: int
    slo_ttft_s: float
    step_s: float
    steps: int
    arrival_s: np.ndarray
    tokens: np.ndarray


@dataclass(slots=True)
class _Demand:
    """Work on the grid, in levels. `ceiling[k]`: arrived and not yet due in step k. `due[k]`: due at its end.
    `misses[misses_from[k] : misses_from[k + 1]]`: (levels, how many) of the requests of which it shows then whether
    they are missed. `begun[k]`: whose first token is due by its end, and which are not yet due. `cache[k, s]`: work
    that the caches of s devices hold. All int64."""

    step_s: float
    level_s: float
    ceiling: np.ndarray
    due: np.ndarray
    misses: np.ndarray
    misses_from: np.ndarray
    begun: np.ndarray
    cache: np.ndarray


def _demand(
    requests: _Requests, due_s: np.ndarray, work_s: np.ndarray, held_s: np.ndarray, *, levels: int
) -> _Demand:
    """`held_s`: work of each request that may be left when its first token is due; zero where all is done by then."""
    step_s, steps = requests.step_s, requests.steps

    def running(at_s: np.ndarray, work: np.ndarray, *, early: bool) -> np.ndarray:
        """Sum of the work whose time lies in this step or before: by its beginning (early) or its end."""
        step = (at_s / step_s).astype(int) if early else np.ceil(at_s / step_s - 1e-9).astype(int) - 1
        kept = step < steps
        return np.cumsum(np.bincount(step[kept], work[kept], minlength=steps))

    first_s = np.minimum(requests.arrival_s + requests.slo_ttft_s, due_s)
    total, owed = running(requests.arrival_s, work_s, early=True), running(due_s, work_s, early=False)
    open_s = total - np.concatenate([[0.0], owed[:-1]])
    # One device and step is a whole number of levels, so that capacity is never rounded.
    level_s = step_s / min(max(math.ceil(levels * step_s / max(float(open_s.max()), step_s)), 1), 64)
    floor = np.floor(owed / level_s + 1e-9).astype(int)
    before = np.concatenate([[0], floor[:-1]])
    begun = np.floor(running(first_s, work_s, early=False) / level_s + 1e-9).astype(int) - before
    misses: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    sizes = np.ceil(work_s / level_s - 1e-9).astype(int)
    ends = np.ceil(first_s / step_s - 1e-9).astype(int) - 1
    kept = ends < steps
    for (step, size), count in Counter(zip(ends[kept].tolist(), sizes[kept].tolist(), strict=True)).items():
        take = 1  # any number of the equal ones, as sums of powers of two
        while count > 0:
            take = min(take, count)
            misses[step].append((size * take, take))
            count, take = count - take, take * 2
    return _Demand(
        step_s=step_s,
        level_s=level_s,
        ceiling=np.ceil(total / level_s - 1e-9).astype(int) - before,
        due=floor - before,
        misses=np.array([miss for step in misses for miss in step], dtype=int).reshape(-1, 2),
        misses_from=np.concatenate([[0], np.cumsum([len(step) for step in misses])]).astype(int),
        begun=begun,
        cache=_caches(requests, due_s, held_s, level_s),
    )


def _caches(requests: _Requests, due_s: np.ndarray, held_s: np.ndarray, level_s: float) -> np.ndarray:
    """Per step and number of devices: the most work (levels) left of requests that fit their caches together."""
    found: list[np.ndarray] = []
    order = np.argsort(-held_s / requests.tokens, kind="stable")
    rank = np.empty(len(order), dtype=int)
    rank[order] = np.arange(len(order))
    at_s, tokens = requests.arrival_s, requests.tokens
    longest_s = float((due_s - at_s).max())
    per_window = max(round(_CACHE_WINDOW_S / requests.step_s), 1)
    for first in range(0, requests.steps, per_window):
        # Alive at some time of the window; looked for only among those that came late enough to be.
        from_s, until_s = first * requests.step_s, (first + per_window) * requests.step_s
        low, high = np.searchsorted(at_s, [from_s - longest_s - 1.0, until_s])
        alive = low + np.flatnonzero(due_s[low:high] >= from_s)
        alive = alive[np.argsort(rank[alive])]
        filled, work = np.cumsum(tokens[alive]), np.cumsum(held_s[alive])
        room = np.arange(requests.devices + 1) * float(requests.model.kv_tokens)
        # One request more than fits, rounded in the oracle's favour; no device holds nothing.
        last = np.searchsorted(filled, room, side="left")
        most = np.concatenate([work, work[-1:]])[np.minimum(last, len(work))] if len(work) else np.zeros(len(room))
        most[0] = 0.0
        row = np.ceil(most / level_s + 1).astype(int)
        found += [row] * min(per_window, requests.steps - first)
    return np.array(found)


def _best_s(demand: _Demand, devices: int, switching: _Switching, price_s: float) -> float:
    """The most training less `price_s` for each request missed; `price_s` infinite: none may be missed.

    State: devices that train, and levels of work served beyond what is due.
    """
    return _walk(
        demand.ceiling,
        demand.due,
        demand.begun,
        demand.cache,
        demand.misses,
        demand.misses_from,
        devices,
        demand.step_s,
        round(demand.step_s / demand.level_s),
        switching.rest_s,
        switching.leave_s - demand.step_s,
        switching.come_s - demand.step_s,
        switching.begin_s,
        price_s,
    )


@numba.njit(cache=True, nogil=True)
def _walk(
    ceiling, due, begun, cache, misses, misses_from, devices,
    step_s, per_step, rest_s, leave_s, come_s, begin_s, price_s,
):  # fmt: skip
    """The programme of `_best_s`: `value[m, l]` of m devices that train with l levels served ahead, step by step.

    Compiled: a step is a few hundred operations on some hundred numbers, so days of steps are all call overhead else.
    """
    sizes, steps = devices + 1, len(due)
    most = 1
    for k in range(steps):
        most = max(most, ceiling[k] + 1)
    value, served = np.full((sizes, most), _NONE), np.empty((sizes, most))
    for m in range(sizes):
        value[m, 0] = -m * begin_s
    width = 1
    k = 0
    while k < steps:
        # Shrinking from m to n costs n * rest + (m - n) * (leave - step): split into what depends on m and on n.
        for level in range(width):
            best = _NONE
            for m in range(sizes - 1, -1, -1):
                best = max(best, value[m, level] - m * leave_s)
                served[m, level] = best - m * (rest_s - leave_s)
            best = _NONE
            for m in range(sizes):
                best = max(best, value[m, level] - m * (rest_s - come_s))
                served[m, level] = max(served[m, level], best - m * come_s)
            for m in range(sizes):
                value[m, level] = max(value[m, level], served[m, level])
        quiet = k
        while quiet < steps and ceiling[quiet] == 0 and due[quiet] == 0:
            quiet += 1
        if quiet > k:  # nothing to serve: one change at its beginning and one at its end is all that can help
            for m in range(sizes):
                value[m, 0] += m * (step_s * (quiet - k))
            width = 1
            k = quiet
            continue
        top = ceiling[k]
        for m in range(sizes):
            more = (devices - m) * per_step
            served[m, : top + 1] = _NONE
            for level in range(width):
                ahead = min(level + more, top)
                served[m, ahead] = max(served[m, ahead], value[m, level] + m * step_s)
        if price_s < np.inf:
            for n in range(misses_from[k], misses_from[k + 1]):
                size, price = min(misses[n, 0], top), price_s * misses[n, 1]
                if size:
                    for m in range(sizes):
                        last = _NONE
                        for level in range(top - size, top + 1):
                            last = max(last, served[m, level])
                        for level in range(top, size - 1, -1):
                            served[m, level] = max(served[m, level], served[m, level - size] - price)
                        served[m, top] = max(served[m, top], last - price)
        left = top + 1 - due[k]
        for m in range(sizes):
            served[m, : max(min(begun[k] - cache[k, devices - m], top + 1), 0)] = _NONE
            if left > 0:
                value[m, :left] = served[m, due[k] : top + 1]
            else:
                value[m, 0] = _NONE
        width = max(left, 1)
        k += 1
    return value[:, :width].max()


def training_device_s(
    requests: Requests,
    model: EngineModel,
    times: VerbTimes,
    *,
    devices: int,
    jobs: list[TraceJob] | None,
    attainment: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> float:
    """An upper bound on device seconds of training within the horizon, by any run with at least this attainment.

    jobs None: one elastic job that never ends.
    """
    horizon_s = requests.horizon_s
    missed = int((1.0 - attainment) * len(requests) + 1e-9)
    switching = _Switching.of(times, whole_job=jobs is None)
    step_s = min(0.5 if horizon_s < 6 * 3600 else 1.0, switching.shortest_s)
    prompt, output = np.asarray(requests.prompt, dtype=float), np.asarray(requests.output, dtype=float)
    trace = _Requests(
        model=model,
        devices=devices,
        slo_ttft_s=slo_ttft_s,
        step_s=step_s,
        steps=max(int(horizon_s / step_s), 1),
        arrival_s=np.asarray(requests.arrival_s, dtype=float),
        tokens=prompt + output,
    )
    first_s = trace.arrival_s + slo_ttft_s
    prompt_s, whole_s = _prompt_s(model, prompt), _whole_s(model, prompt, output)
    sides = (
        (first_s, prompt_s, np.zeros(len(prompt))),
        (first_s + (output - 1) * slo_tpot_s, whole_s, whole_s - model.per_token_s * prompt),
    )
    fine = [_demand(trace, *side, levels=_LEVELS) for side in sides]
    none_missed_s = [_best_s(demand, devices, switching, math.inf) for demand in fine]
    tight = min(range(len(sides)), key=lambda n: none_missed_s[n])
    best_s = none_missed_s[tight]
    if missed:
        price_s = _price_s(_demand(trace, *sides[tight], levels=_SEARCH_LEVELS), devices, switching, missed)
        best_s = _best_s(fine[tight], devices, switching, price_s) + price_s * missed
    # The last part of a step is not on the grid.
    bound_s = min(best_s + devices * max(horizon_s - trace.steps * step_s, 0.0), devices * horizon_s)
    if jobs is not None:
        offered_s = sum(
            j.devices * min(j.duration_s, max(horizon_s - j.at_s - times.start_group_s, 0.0)) for j in jobs
        )
        bound_s = min(bound_s, offered_s)
    return max(bound_s, 0.0)


def _price_s(coarse: _Demand, devices: int, switching: _Switching, missed: int) -> float:
    """A price of a miss that gives about the lowest bound: value(price) + price * missed is convex in the price."""

    def bound(exponent: float) -> float:
        price_s = math.exp(exponent)
        return _best_s(coarse, devices, switching, price_s) + price_s * missed

    low, high = math.log(0.5), math.log(200.0)
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = bound(a), bound(b)
    for _ in range(_PRICE_TRIALS):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = bound(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = bound(b)
    return math.exp(a if at_a <= at_b else b)


def _prompt_s(model: EngineModel, prompt: np.ndarray) -> np.ndarray:
    """Least device seconds per prompt: every step takes `chunk_tokens` at most and pays its fixed time."""
    return prompt * (model.per_token_s + model.base_s / model.chunk_tokens)


def _whole_s(model: EngineModel, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Least device seconds per request. A step's fixed time is paid once for prompts and outputs together, so it is
    charged to whichever fills more steps: chunks of prompts, seats of the batch, or the cache."""
    tokens = output - 1
    linear_s = model.per_token_s * (prompt + tokens) + model.per_context_s * tokens * prompt
    shares = (
        prompt / model.chunk_tokens,
        tokens / model.max_num_seqs,
        tokens * np.minimum((prompt + output) / model.kv_tokens, 1.0),
    )
    return linear_s + model.base_s * max(shares, key=lambda share: float(share.sum()))
