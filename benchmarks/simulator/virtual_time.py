"""An asyncio event loop whose time jumps to the next timer instead of waiting, for the simulator and for tests.

Sleeps and timeouts of asyncio end in the same order as in real time, but take no real time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

RESOLUTION_S = 1e-6


class _JumpingSelector(selectors.SelectSelector):
    """Waits only for timers, by jumping to the time of the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: no timer is scheduled and nothing can wake this loop")
        if timeout > 0:
            self.jumped_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time `start_s`; `time()` advances only by jumps to the next timer."""

    def __init__(self, start_s: float = 0.0):
        self._jumping = _JumpingSelector()
        self._start_s = start_s
        super().__init__(self._jumping)
        # Seconds since the epoch have steps of 2.4e-7 as floats. With the real clock's 1 ns, a timer that is due
        # exactly now would never count as due, and the loop would spin.
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._start_s + self._jumping.jumped_s


def now_s() -> float:
    """Return the running loop's time; serves as a clock for the scheduler."""
    return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T], start_s: float = 0.0) -> T:
    """Run a coroutine like `asyncio.run`, but in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_s)) as runner:
        return runner.run(main)
