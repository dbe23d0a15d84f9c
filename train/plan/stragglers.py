"""Decides which rank holds up the others: a pure rule over the time that each rank computes by itself in a step.

Rules
- A rank is slow in a step if it takes more than `TIMES` as long as the median of the others, and `LEAST_S` longer.
- It is a straggler if it was slow in `ENOUGH` of the last `WINDOW` steps: rows differ in length, and a busy machine has
  its moments.
- It is told of once, and again only after a window in which it was no straggler.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW, ENOUGH = 32, 24
TIMES, LEAST_S = 1.25, 0.02


@dataclass(frozen=True, slots=True)
class Straggler:
    """`seconds`: what the rank computed by itself in a step, the median of the last ones. `usual_s`: the others."""

    step: int
    rank: int
    seconds: float
    usual_s: float


class RankTimes:
    """What the ranks of one world took for its steps so far."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._reported_at: dict[int, int] = {}  # rank -> the last step at which it was one

    def look(self, step: int, seconds: Sequence[float]) -> Straggler | None:
        """`step` is done, for which each rank computed so long by itself. Returns a straggler that is not told of yet,
        of several the slowest."""
        self._steps.append(tuple(seconds))
        found = [rank for rank in range(len(seconds)) if self._is_straggler(rank)]
        new = [rank for rank in found if step - self._reported_at.get(rank, step - WINDOW - 1) > WINDOW]
        self._reported_at |= dict.fromkeys(found, step)
        told = [Straggler(step, rank, self._usual([rank]), self._usual(self._others(rank))) for rank in new]
        return max(told, key=lambda one: one.seconds, default=None)

    def _is_straggler(self, rank: int) -> bool:
        others = self._others(rank)
        if not others:
            return False
        slow = 0
        for seconds in self._steps:
            usual_s = statistics.median(seconds[other] for other in others)
            slow += seconds[rank] > max(TIMES * usual_s, usual_s + LEAST_S)
        return slow >= ENOUGH

    def _usual(self, ranks: Sequence[int]) -> float:
        return statistics.median(statistics.median(seconds[rank] for rank in ranks) for seconds in self._steps)

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(len(self._steps[-1])) if other != rank]
