"""Notices when somebody sets the machine's clock back.

The controller remembers its waits (the next try of a model or a tier, the next look at the devices, memory that an
engine was promised) by the time of day, because people see those times. A clock that is set forward ends such waits
early, which harms nothing; a clock that is set back by an hour makes each an hour longer. A controller that is started
again remembers none of them, and the restart costs neither a request nor a step.

Ray's timers use the time of day too. After a clock that was an hour ahead had been corrected, the raylet reported no
freed devices for that hour, and nobody got a lease. So Ray is started again as well, and engines and ranks with it,
which is worth it from some minutes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

EVERY_S = 2.0
LEAST_S = 30.0
"""Waits that become longer by less than this are accepted."""
LEAST_FOR_RAY_S = 180.0
"""Leases that wait longer by less than this are accepted: a restart would end engines and ranks."""


class ClockWatch:
    """`least_s`: the least step that is worth a restart. `wall` is the time of day, `steady` a clock that nobody
    sets."""

    def __init__(
        self,
        least_s: float = LEAST_S,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ):
        self._least_s, self._wall, self._steady = least_s, wall, steady
        self._ahead_s = wall() - steady()

    def set_back_s(self) -> float:
        """How many seconds the clock was set back since the last call that reported it, in one step or in many; 0 if
        that is not worth a restart."""
        ahead_s = self._wall() - self._steady()
        back_s = self._ahead_s - ahead_s
        if back_s <= 0 or back_s >= self._least_s:
            self._ahead_s = ahead_s
        return back_s if back_s >= self._least_s else 0.0


async def far_back_s(watch: ClockWatch, every_s: float = EVERY_S) -> float:
    """Waits until the clock was set back by as much as `watch` looks for; returns the seconds."""
    while not (back_s := watch.set_back_s()):
        await asyncio.sleep(every_s)
    return back_s
