"""What an online policy reaches that knows the next w seconds of traffic, in a fluid model of the box.

The model: time goes in steps of the box's reaction, so a device taken in one step answers from the next. Requests are
work in device seconds: a prompt's when it comes, its answer's while it is generated. What waits for longer than the
target is late, at a price. A change of size stops the job on all its devices.

The policy is hindsight optimisation (Chong, Givan and Chang 2000): it knows the next w seconds, and values where it
then stands by what a clairvoyant made of situations like that in other traces of the same kind. A situation is the work
that came of late, over a few seconds and over a minute. So w = 0 is a policy that knows its traffic well and nothing of
the future, w = infinity is the optimum of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

from scheduler.simulator.engine import EngineModel
from scheduler.simulator.trace import Requests

LATELY_S = (5.0, 60.0)
"""Time constants of the work that came of late, by which situations are told apart."""
_CLASSES = (6, 4)
"""How many situations by each of them."""
_LEVELS = 33
_END_S = 180.0
"""A clairvoyant that sees the end of its trace says nothing of one that goes on."""


@dataclass(frozen=True, slots=True)
class Box:
    """step_s: from a decision until a device taken answers. pause_s: what a change of size costs on each of the job's
    devices. level_s: the backlog's grid, in device seconds."""

    devices: int
    step_s: float = 1.2
    pause_s: float = 3.8
    target_s: float = 2.0

    @property
    def level_s(self) -> float:
        return 4 * self.devices * self.target_s / (_LEVELS - 1)


@dataclass(frozen=True, slots=True)
class Reached:
    """trained: device seconds. late: share of the work that was late. changes: of size."""

    trained: float
    late: float
    changes: int


def work_of(requests: Requests, model: EngineModel, step_s: float, tpot_s: float) -> np.ndarray:
    """Device seconds of work that come in each step. An answer is generated in a batch half as large as one may be."""
    prompt, output = np.asarray(requests.prompt, dtype=float), np.asarray(requests.output, dtype=float)
    batch = max(model.target_inflight(tpot_s=tpot_s, prompt=prompt.mean(), output=output.mean()) // 2, 1)
    context = float((prompt + output / 2).mean())
    token_s = model.base_s / batch + model.per_token_s + model.per_context_s * context
    return _spread(
        np.asarray(requests.arrival_s, dtype=float),
        prompt * model.per_token_s,
        output * token_s,
        output * token_s * batch,
        step_s,
        max(int(requests.horizon_s / step_s), 2),
    )


@numba.njit(cache=True)
def _spread(arrival_s, prompt_s, answer_s, lasts_s, step_s, steps):  # type: ignore[no-untyped-def]
    work = np.zeros(steps)
    for i in range(len(arrival_s)):
        first = int(arrival_s[i] / step_s)
        if first >= steps:
            continue
        work[first] += prompt_s[i]
        for k in range(first, min(int((arrival_s[i] + lasts_s[i]) / step_s) + 1, steps)):
            from_s, until_s = max(arrival_s[i], k * step_s), min(arrival_s[i] + lasts_s[i], (k + 1) * step_s)
            work[k] += answer_s[i] * (until_s - from_s) / max(lasts_s[i], 1e-9)
    return work


@numba.njit(cache=True)
def _stage(now, then, backlog_s, work_s, box):  # type: ignore[no-untyped-def]
    """(device seconds trained, work late, backlog after) of a step that begins with `now` devices serving and the
    decision for `then`."""
    devices, step_s, pause_s, target_s = box
    able_s = min(now, then) * step_s
    trained_s = (devices - then) * (step_s - (pause_s if now != then else 0.0))
    waits_s = backlog_s + work_s
    # What comes in the middle of the step is in time if those that answer then are through with it by the target.
    late_s = min(max(waits_s - able_s - then * (target_s - step_s / 2), 0.0), work_s)
    return trained_s, late_s, max(waits_s - able_s, 0.0)


@numba.njit(cache=True)
def _at(value, backlog_s, level_s):  # type: ignore[no-untyped-def]
    place = min(backlog_s / level_s, len(value) - 1.0)
    low = min(int(place), len(value) - 2)
    return value[low] + (value[low + 1] - value[low]) * (place - low)


@numba.njit(cache=True)
def _before(after, work_s, price, level_s, box, value):  # type: ignore[no-untyped-def]
    """Fill `value[now, level]`, the most that can be had from a step on in which this work comes."""
    sizes, levels = after.shape
    for now in range(sizes):
        for level in range(levels):
            best = -1e18
            for then in range(sizes):
                trained_s, late_s, backlog_s = _stage(now, then, level * level_s, work_s, box)
                best = max(best, trained_s - price * late_s + _at(after[then], backlog_s, level_s))
            value[now, level] = best


@numba.njit(cache=True)
def _learn(work, situation, situations, last, price, level_s, levels, box):  # type: ignore[no-untyped-def]
    """The mean worth of each decision, of what a clairvoyant makes of it: [situation, now, level, then]."""
    sizes = int(box[0]) + 1
    worth, count = np.zeros((situations, sizes, levels, sizes)), np.zeros(situations)
    after, value = np.zeros((sizes, levels)), np.zeros((sizes, levels))
    for k in range(len(work) - 1, -1, -1):
        if k < last:
            s = situation[k]
            count[s] += 1
            for now in range(sizes):
                for level in range(levels):
                    for then in range(sizes):
                        trained_s, late_s, backlog_s = _stage(now, then, level * level_s, work[k], box)
                        gain_s = trained_s - price * late_s + _at(after[then], backlog_s, level_s)
                        worth[s, now, level, then] += gain_s - after[0, 0]
        _before(after, work[k], price, level_s, box, value)
        after, value = value, after
    return worth, count


@numba.njit(cache=True)
def _live(work, situation, worth, ahead, price, level_s, box):  # type: ignore[no-untyped-def]
    """Live through the trace, knowing `ahead` steps. Returns (device seconds trained, work late, changes)."""
    situations, sizes, levels, _ = worth.shape
    ends = np.empty((situations, sizes, levels))
    for s in range(situations):
        for now in range(sizes):
            for level in range(levels):
                ends[s, now, level] = worth[s, now, level].max()
    after, value = np.empty((sizes, levels)), np.empty((sizes, levels))
    now, backlog_s, trained, late, changes = 1, 0.0, 0.0, 0.0, 0
    steps = len(work)
    for k in range(steps):
        best, chosen = -1e18, now
        if ahead > 0:
            end = min(k + ahead, steps)
            if end < steps:
                after[:] = ends[situation[end]]
            else:
                after[:] = 0.0
            for j in range(end - 1, k, -1):
                _before(after, work[j], price, level_s, box, value)
                after, value = value, after
        for then in range(sizes):
            if ahead > 0:
                trained_s, late_s, left_s = _stage(now, then, backlog_s, work[k], box)
                gain_s = trained_s - price * late_s + _at(after[then], left_s, level_s)
            else:
                gain_s = _at(worth[situation[k], now, :, then], backlog_s, level_s)
            # Ties go to what needs no change.
            if gain_s > best + 1e-9 or (then == now and gain_s >= best - 1e-9):
                best, chosen = gain_s, then
        trained_s, late_s, backlog_s = _stage(now, chosen, backlog_s, work[k], box)
        trained, late, changes, now = trained + trained_s, late + late_s, changes + (now != chosen), chosen
    return trained, late, changes


@numba.njit(cache=True)
def _optimum(work, price, level_s, levels, box):  # type: ignore[no-untyped-def]
    """As `_live`, with the whole trace known."""
    sizes, steps = int(box[0]) + 1, len(work)
    values = np.zeros((steps + 1, sizes, levels))
    for k in range(steps - 1, -1, -1):
        _before(values[k + 1], work[k], price, level_s, box, values[k])
    now, backlog_s, trained, late, changes = 1, 0.0, 0.0, 0.0, 0
    for k in range(steps):
        best, chosen = -1e18, now
        for then in range(sizes):
            trained_s, late_s, left_s = _stage(now, then, backlog_s, work[k], box)
            gain_s = trained_s - price * late_s + _at(values[k + 1, then], left_s, level_s)
            if gain_s > best + 1e-9 or (then == now and gain_s >= best - 1e-9):
                best, chosen = gain_s, then
        trained_s, late_s, backlog_s = _stage(now, chosen, backlog_s, work[k], box)
        trained, late, changes, now = trained + trained_s, late + late_s, changes + (now != chosen), chosen
    return trained, late, changes


class Foresight:
    """What policies reach on one trace; `others` are traces of the same kind, from which they know their traffic."""

    def __init__(self, work: np.ndarray, others: list[np.ndarray], box: Box):
        self._work, self._others, self._box = work, others, box
        self._parameters = (float(box.devices), box.step_s, box.pause_s, box.target_s)
        self._worth: dict[float, np.ndarray] = {}
        known = np.concatenate([self._lately(other) for other in others])
        self._edges = [
            np.quantile(known[:, n], np.linspace(0, 1, classes + 1)[1:-1]) for n, classes in enumerate(_CLASSES)
        ]

    def reached(self, ahead_s: float, price: float) -> Reached:
        """By the policy that knows the next `ahead_s` (inf: all), at `price` device seconds for one of late work."""
        box = self._box
        if math.isinf(ahead_s):
            return self._of(_optimum(self._work, price, box.level_s, _LEVELS, self._parameters))
        if price not in self._worth:
            self._worth[price] = self._learned(price)
        worth, ahead = self._worth[price], round(ahead_s / box.step_s)
        return self._of(
            _live(self._work, self._situation(self._work), worth, ahead, price, box.level_s, self._parameters)
        )

    def _learned(self, price: float) -> np.ndarray:
        """The mean worth of each decision in each situation, over the other traces."""
        box, situations = self._box, math.prod(_CLASSES)
        worth: np.ndarray = np.zeros(())
        count = np.zeros(situations)
        for other in self._others:
            last = max(len(other) - int(_END_S / box.step_s), 1)
            situation = self._situation(other)
            found = _learn(other, situation, situations, last, price, box.level_s, _LEVELS, self._parameters)
            worth, count = worth + found[0], count + found[1]
        overall = worth.sum(axis=0) / count.sum()
        known = count[:, None, None, None]
        return np.where(known > 0, worth / np.maximum(known, 1), overall)

    def split(self, serving: int) -> Reached:
        """By a constant number of devices in serving."""
        backlog_s = trained = late = 0.0
        for work_s in self._work:
            more_s, late_s, backlog_s = _stage(serving, serving, backlog_s, work_s, self._parameters)
            trained, late = trained + more_s, late + late_s
        return self._of((trained, late, 0))

    def _of(self, found: tuple[float, float, int]) -> Reached:
        return Reached(found[0], found[1] / max(float(self._work.sum()), 1e-9), found[2])

    def _lately(self, work: np.ndarray) -> np.ndarray:
        """What came before each step, faded: [step, time constant]."""
        found = np.zeros((len(work), len(LATELY_S)))
        for n, for_s in enumerate(LATELY_S):
            fade = math.exp(-self._box.step_s / for_s)
            for k in range(1, len(work)):
                found[k, n] = found[k - 1, n] * fade + work[k - 1] * (1 - fade)
        return found

    def _situation(self, work: np.ndarray) -> np.ndarray:
        lately = self._lately(work)
        first, second = (np.searchsorted(edges, lately[:, n]) for n, edges in enumerate(self._edges))
        return (first * _CLASSES[1] + second).astype(np.int64)
