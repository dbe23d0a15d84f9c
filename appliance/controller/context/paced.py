"""Lets each owner do one thing at a time, and leaves the box alone for a while before his next: for changes that are
cheap to ask for and cost everybody, as a new table does at each gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

_PAUSES = 4.0
"""Times as long as the thing took: of what it takes, one owner has a fifth."""


class Paced:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """clock: in seconds."""
        self._clock, self._sleep = clock, sleep
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free_s: dict[str, float] = {}  # by owner: when he may again

    @asynccontextmanager
    async def turn(self, owner: str | None) -> AsyncIterator[None]:
        """Around the change. None: an administrator, who waits for nobody. A person who waits here may have lost his
        key, or his login, meanwhile."""
        if owner is None:
            yield
            return
        lock = self._turns.setdefault(owner, asyncio.Lock())
        async with lock:
            if (wait_s := self._free_s.pop(owner, 0.0) - self._clock()) > 0:
                await self._sleep(wait_s)
            began_s = self._clock()
            try:
                yield
            finally:
                now_s = self._clock()
                self._free_s = {one: free_s for one, free_s in self._free_s.items() if free_s > now_s}
                self._free_s[owner] = now_s + _PAUSES * (now_s - began_s)
