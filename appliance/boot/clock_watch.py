"""Whether somebody has set the machine's clock back.

What the controller waits for (the next try of a model or a tier, the next look at the devices, memory that an engine
was promised) it remembers by the time of day, as people are told it. A clock that is set on makes such waits end early,
which harms nothing; one that is set back by an hour makes each of them an hour longer. A controller that starts anew
remembers none of them, and costs neither a request nor a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 2.0
LEAST_S = 30.0
"""A wait that is so much longer is borne."""


class ClockWatch:
    """`wall` and `steady`: the time of day, and the time since some moment, which nobody sets."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic):
        self._wall, self._steady = wall, steady
        self._ahead_s = wall() - steady()

    def set_back_s(self) -> float:
        """By how many seconds the clock was set back since this was said last, in one step or in many; 0 when that is
        not worth a start."""
        ahead_s = self._wall() - self._steady()
        back_s = self._ahead_s - ahead_s
        if back_s <= 0 or back_s >= LEAST_S:
            self._ahead_s = ahead_s
        return back_s if back_s >= LEAST_S else 0.0
