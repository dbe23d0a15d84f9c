"""Computes an upper bound on the training of any scheduler that knows the future and pays the same switching times.

The oracle is an offline optimum, found by dynamic programming over time, of a relaxed problem. Every run of the real
scheduler is a feasible point of that problem, so no run can train more at no lower attainment.

Kept (constraints on every scheduler):

1. Whole devices. At each moment the job trains on m devices and at most N - m serve.
2. Switching. When the job changes size its ranks stop and start again; a device that changes sides is useful to
   neither until it is suspended, leased and awake (or asleep, leased and started). Times are those of `VerbTimes`.
   With a list of jobs only the devices that move pay, since other jobs need not be affected.
3. Work and targets. A request needs at least the device time that the engine model charges for its tokens in the
   fullest possible batch. The work served up to any moment is at least that of the requests due by then, and at most
   that of the requests that have arrived. A prompt is due `slo_ttft_s` after arrival, a whole request when its last
   token is due. Requests may be missed, as many as in the run it is compared with: the oracle picks those that gain it
   most (a price per miss, minimised over: Lagrange's bound).
4. Memory. A request with a first token occupies the KV cache of a serving device until its last. So the remaining work
   of all requests that arrived more than `slo_ttft_s` ago is at most what the caches hold, filled with the requests
   that have most work per token of cache.

Relaxed (free for the oracle): draining; the size of real batches and their imbalance over engines; all devices work on
a single request at once; order of service beyond the rule above; everything finer than a grid of `step_s` (arrivals
count from the beginning of a step, deadlines at its end, work is rounded in the oracle's favour on its running sum, so
that roundings do not add up, and a switch gains the larger side for the whole step).

The module computes two bounds, one from prompts alone with their short deadlines, one from whole requests. The bound is
the lower of the two when no request may be missed; missed requests are priced in it alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

from scheduler.simulator.effects import VerbTimes
from scheduler.simulator.engine import EngineModel
from scheduler.simulator.oracle_demand import GridDemand, TraceArrays, demand_of, prompt_s, whole_s
from scheduler.simulator.trace import Requests, TraceJob

_NONE = -1e18
_LEVELS = 200
"""Resolution of the work served ahead of its deadlines: finer gives a tighter bound but takes longer."""
_SEARCH_LEVELS = 24
"""The same during the search for the price of a miss: every price gives a valid bound, so it may be coarse."""
_PRICE_TRIALS = 4


@dataclass(frozen=True, slots=True)
class _Switching:
    """Seconds that a device loses: `rest` if it stays with the job, `leave` if it goes to serving, `come` if it goes to
    training, `begin` if it trains from the first moment on. The elastic job runs when the trace begins; listed jobs are
    submitted then.
    """

    rest_s: float
    leave_s: float
    come_s: float
    begin_s: float

    @classmethod
    def of(cls, times: VerbTimes, *, whole_job: bool) -> _Switching:
        again_s = times.suspend_s + times.start_group_s + times.lease_s
        # A listed job may end by itself at the moment when its devices are wanted.
        stop_s = times.suspend_s if whole_job else min(times.suspend_s, times.stop_s)
        return cls(
            rest_s=again_s if whole_job else 0.0,
            leave_s=stop_s + times.lease_s + min(times.wake_s, times.start_s) + times.open_s,
            come_s=times.sleep_s + times.lease_s + times.start_group_s,
            begin_s=0.0 if whole_job else times.start_group_s,
        )

    @property
    def shortest_s(self) -> float:
        """The least time between two changes of size."""
        return max(min(self.leave_s, self.come_s) / 2, 0.05)


def _best_s(demand: GridDemand, devices: int, switching: _Switching, price_s: float) -> float:
    """The most training, less `price_s` for each missed request. With an infinite price none may be missed.

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


# A step is a few hundred operations on some hundred numbers: Python would spend days on call overhead alone.
_compiled = numba.njit(cache=True, nogil=True)


@_compiled
def _walk(
    ceiling,
    due,
    begun,
    cache,
    misses,
    misses_from,
    devices,
    step_s,
    per_step,
    rest_s,
    leave_s,
    come_s,
    begin_s,
    price_s,
):
    """The dynamic programme of `_best_s`: `value[m, l]` of m training devices with l levels served ahead, per step."""
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
        _resize(value, served, width, rest_s, leave_s, come_s)
        quiet = k
        while quiet < steps and ceiling[quiet] == 0 and due[quiet] == 0:
            quiet += 1
        if quiet > k:  # nothing to serve: only a change at its beginning and one at its end can help
            for m in range(sizes):
                value[m, 0] += m * (step_s * (quiet - k))
            width = 1
            k = quiet
            continue
        top = ceiling[k]
        _serve(value, served, width, top, per_step, step_s)
        if price_s < np.inf:
            for n in range(misses_from[k], misses_from[k + 1]):
                _miss(served, min(misses[n, 0], top), top, price_s * misses[n, 1])
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


@_compiled
def _resize(value, served, width, rest_s, leave_s, come_s):
    """Another number of training devices, where that is worth more. Shrinking from m to n costs n * rest +
    (m - n) * (leave - step): split into the parts that depend on m and n."""
    sizes = len(value)
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


@_compiled
def _serve(value, served, width, top, per_step, step_s):
    """One step: the training devices train, the others serve ahead, up to level `top`."""
    sizes = len(value)
    for m in range(sizes):
        more = (sizes - 1 - m) * per_step
        served[m, : top + 1] = _NONE
        for level in range(width):
            ahead = min(level + more, top)
            served[m, ahead] = max(served[m, ahead], value[m, level] + m * step_s)


@_compiled
def _miss(served, size, top, price_s):
    """A request of `size` levels is missed, where that is worth its price."""
    if size:
        for m in range(len(served)):
            last = _NONE
            for level in range(top - size, top + 1):
                last = max(last, served[m, level])
            for level in range(top, size - 1, -1):
                served[m, level] = max(served[m, level], served[m, level - size] - price_s)
            served[m, top] = max(served[m, top], last - price_s)


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
    trace = TraceArrays(
        model=model,
        devices=devices,
        slo_ttft_s=slo_ttft_s,
        step_s=step_s,
        steps=max(int(horizon_s / step_s), 1),
        arrival_s=np.asarray(requests.arrival_s, dtype=float),
        # An engine with no other request accepts one larger than its cache: it fills one cache, not several.
        tokens=np.minimum(prompt + output, model.kv_tokens),
    )
    first_s = trace.arrival_s + slo_ttft_s
    of_prompts_s, of_all_s = prompt_s(model, prompt), whole_s(model, prompt, output)
    sides = (
        (first_s, of_prompts_s, np.zeros(len(prompt))),
        (first_s + (output - 1) * slo_tpot_s, of_all_s, of_all_s - model.per_token_s * prompt),
    )
    fine = [demand_of(trace, *side, levels=_LEVELS) for side in sides]
    none_missed_s = [_best_s(demand, devices, switching, math.inf) for demand in fine]
    tight = min(range(len(sides)), key=lambda n: none_missed_s[n])
    best_s = none_missed_s[tight]
    if missed:
        price_s = _price_s(demand_of(trace, *sides[tight], levels=_SEARCH_LEVELS), devices, switching, missed)
        best_s = _best_s(fine[tight], devices, switching, price_s) + price_s * missed
    # The remainder of the last step is not on the grid.
    bound_s = min(best_s + devices * max(horizon_s - trace.steps * step_s, 0.0), devices * horizon_s)
    if jobs is not None:
        offered_s = sum(j.devices * min(j.duration_s, max(horizon_s - j.at_s - times.start_group_s, 0.0)) for j in jobs)
        bound_s = min(bound_s, offered_s)
    return max(bound_s, 0.0)


def _price_s(coarse: GridDemand, devices: int, switching: _Switching, missed: int) -> float:
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
