"""Tells when a surge of traffic is over, so that what it made late is not held against the traffic of now.

Lateness rises with load. So what was late under a load several times that of now does not say that as much will be
late now, and after a surge the half hour that the allowance of late requests is for holds other traffic alone. But the
memory of `standby.py` fades by a share: a hundred times the allowance is above it for two hours and a half.

A surge is over once for half an hour no five minutes brought a third of the work that some five minutes of the three
hours before did. Ordinary swings, bursts and clients that come and go hardly ever fall as far for as long. A surge that
returns later is met as the first one was. A restart in that half hour loses sight of the surge: what it made late then
fades.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

STEP_S = 300.0
OVER_AFTER = 6
"""Steps in a row that must bring little."""
FAR = 3.0
REMEMBERED = 36


@dataclass(frozen=True, slots=True)
class Step:
    """work: replica seconds that came, for each second. sums: the caller's at its end, at_s."""

    at_s: float
    work: float
    sums: Sequence[float]


class Surges:
    """The work that came of late."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=REMEMBERED)
        self._from_s: float | None = None
        self._work_s = 0.0

    def over(self, now_s: float, work_s: float, sums: Callable[[], Sequence[float]]) -> Step | None:
        """work_s: replica seconds that came since the last call. Returns, at the end of a step by which a surge is
        over, the step after which its last half hour began. It is returned again until `forget`."""
        if self._from_s is None:
            self._from_s = now_s
        self._work_s += work_s
        passed_s = now_s - self._from_s
        if passed_s < STEP_S:
            return None
        self._steps.append(Step(now_s, self._work_s / passed_s, sums()))
        self._from_s, self._work_s = now_s, 0.0
        before = len(self._steps) - OVER_AFTER
        if before < 1:
            return None
        most = max(step.work for step in islice(self._steps, before, None))
        if max(step.work for step in islice(self._steps, before)) <= FAR * most:
            return None
        return self._steps[before - 1]

    def forget(self) -> None:
        """The surge has been dealt with."""
        while len(self._steps) > OVER_AFTER:
            self._steps.popleft()
