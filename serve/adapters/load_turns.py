"""Has an engine's core load one adapter at a time, and lets its steps go on in between.

vLLM's core loads an adapter when its name is first asked for, on the thread that computes steps, and all that are asked
for together before its next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary


class LoadTurns:
    """Whose adapter is the next that the core is asked to load. busy: whether the engine answers anybody."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._loading, self._of_owners = asyncio.Lock(), WeakValueDictionary[str, asyncio.Lock]()
        self._own: asyncio.Lock | None = None
        self._next_s = 0.0

    async def take(self, owner: str) -> None:
        """Returns when it is this owner's turn; `load` or `give_back` must follow."""
        # An owner's requests wait for each other before one of them waits for others': so owners take turns.
        own = self._of_owners.setdefault(owner, asyncio.Lock())
        async with AsyncExitStack() as taken:
            for lock in (own, self._loading):
                await lock.acquire()
                taken.callback(lock.release)
            while self._busy() and (left_s := self._next_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            self._own = own
            taken.pop_all()

    def give_back(self) -> None:
        own, self._own = self._own, None
        assert own is not None, "nobody has the turn"
        self._loading.release()
        own.release()

    async def load(self, loading: Awaitable[bool]) -> bool:
        """loading: AsyncLLM.add_lora. Gives the turn back."""
        began_s, load = time.monotonic(), asyncio.ensure_future(loading)
        try:
            return await asyncio.shield(load)
        finally:
            await asyncio.wait([load])  # the core is at it although its client has left
            now_s = time.monotonic()
            self._next_s = now_s + (now_s - began_s)
            self.give_back()
