"""Whether somebody has set the machine's clock back.

What the controller waits for (the next try of a model or a tier, the next look at the devices, memory that an engine
was promised) it remembers by the time of day, as people are told it. A clock that is set on makes such waits end early,
which harms nothing; one that is set back by an hour makes each of them an hour longer. A controller that starts anew
remembers none of them, and costs neither a request nor a step.

So it is with Ray, whose timers go by the time of day: after a clock that was an hour ahead had been put right, the
raylet told nothing of freed devices for that hour, and no lease was given. It starts anew too, and engines and ranks
with it, which is worth it from minutes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

EVERY_S = 2.0
LEAST_S = 30.0
"""A wait that is so much longer is borne."""
LEAST_FOR_RAY_S = 180.0
"""Leases that wait so much longer are borne rather than that engines and ranks end."""


class ClockWatch:
    """`least_s`: what is worth a start; `wall` and `steady`: the time of day, and the time since some moment, which
    nobody sets."""

    def __init__(
        self, least_s: float = LEAST_S,
        wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._least_s, self._wall, self._steady = least_s, wall, steady
        self._ahead_s = wall() - steady()

    def set_back_s(self) -> float:
        """By how many seconds the clock was set back since this was said last, in one step or in many; 0 when that is
        not worth a start."""
        ahead_s = self._wall() - self._steady()
        back_s = self._ahead_s - ahead_s
        if back_s <= 0 or back_s >= self._least_s:
            self._ahead_s = ahead_s
        return back_s if back_s >= self._least_s else 0.0


async def far_back_s(watch: ClockWatch, every_s: float = EVERY_S) -> float:
    """Returns when the clock was set back by as much as `watch` looks for: by how many seconds."""
    while not (back_s := watch.set_back_s()):
        await asyncio.sleep(every_s)
    return back_s
