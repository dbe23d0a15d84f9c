"""Works on many things that go on for a long time, each by one task at a time, and begins the tasks one by one with the
loop free in between: what one owner has a hundred of holds up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from runtime.background_tasks import BackgroundTasks, RunningTasks


class OneEach:
    """kind: of the things, for the log."""

    def __init__(self, background: BackgroundTasks, kind: str):
        self._background, self._kind = background, kind
        self.tasks = RunningTasks()
        self._busy: set[str] = set()

    async def begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Nothing while an earlier task works on it. Returns once the loop was free for as long as the first piece of
        the work, up to where it waits for something, has held it."""
        if name in self._busy:
            return
        self._busy.add(name)

        async def guarded() -> None:
            try:
                with self._background.guard(f"{self._kind}: {name}"):
                    await work()
            finally:
                self._busy.discard(name)

        began_s = time.monotonic()
        self.tasks.add(asyncio.create_task(guarded(), name=f"{self._kind} {name}"))
        await asyncio.sleep(0)
        await asyncio.sleep(time.monotonic() - began_s)
