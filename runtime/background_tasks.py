"""Runs the tasks that a process needs for its whole life and restarts them after exceptions.

It logs an exception with the task's name and restarts the task after a pause that doubles from 1 s to 60 s. Until the
task recovers it is degraded: the process continues without it, and `BackgroundTasks.degraded` says since when and why,
which `appliance status` and `/health` show. Cancellation passes through. A task that returns has finished its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 60.0)
"""Pauses between restarts: the first, and the longest."""
STEADY_S = 30.0
"""A task has recovered once it has run this long since its restart, or after a successful round if it works in
rounds."""


def first_words(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class BackgroundTasks:
    """The background tasks of one process, on one event loop."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep):
        self._sleep = sleep
        self._troubles: dict[str, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(
        self, name: str, run: Callable[[], Awaitable[None]], pauses_s: tuple[float, float] = PAUSES_S
    ) -> asyncio.Task[None]:
        """Run `run`, and restart it after every exception, until it returns or is cancelled. pauses_s: first,
        longest."""
        return self._start(name, self._keep(name, run, pauses_s))

    def keep_every(
        self, name: str, once: Callable[[], Awaitable[None]], every_s: float, *, at_once: bool = False
    ) -> asyncio.Task[None]:
        """Call `run` every `every_s` seconds for ever; the first time at once if `at_once`, else after `every_s`."""

        async def rounds() -> None:
            # After a failure the task has already paused, so the next round runs at once.
            if not at_once and name not in self._troubles:
                await self._sleep(every_s)
            while True:
                await once()
                self._well(name)
                await self._sleep(every_s)

        return self.keep(name, rounds)

    def once(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `run` once, under `guard`."""

        async def guarded() -> None:
            with self.guard(name):
                await run()

        return self._start(name, guarded())

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Log an exception of work that another loop calls, and mark `name` degraded; the exception is not raised. The
        next call without an exception ends that."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged and shown; the caller continues with its own work
            self._failed(name, error)
        else:
            self._well(name)

    def names(self) -> list[str]:
        """Return names of degraded tasks, cut at the colon: only operators of the box may see the rest."""
        return sorted({name.partition(":")[0] for name in list(self._troubles)})

    def degraded(self) -> list[dict[str, Any]]:
        """`[{"name", "since_s" (Unix time), "why", "failures" (in a row)}]`, sorted by name."""
        return [{"name": name, **trouble} for name, trouble in sorted(self._troubles.items())]

    async def stop(self) -> None:
        """Cancel all tasks and wait for them to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]], pauses_s: tuple[float, float]) -> None:
        pause_s = pauses_s[0]
        while True:
            steady = asyncio.get_running_loop().call_later(STEADY_S, self._well, name)
            try:
                await run()
                self._well(name)
                return
            except Exception as error:  # noqa: BLE001 - logged, shown and tried again: background tasks are for that
                pause_s = min(2 * pause_s, pauses_s[1]) if name in self._troubles else pauses_s[0]
                self._failed(name, error)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    return  # a restart would never end, and the canceller waits for the end
            finally:
                steady.cancel()
            await self._sleep(pause_s)

    def _failed(self, name: str, error: Exception) -> None:
        trouble = self._troubles.setdefault(name, {"since_s": time.time(), "why": "", "failures": 0})
        trouble["failures"] += 1
        trouble["why"] = first_words(error)
        log.error("%s failed, time %d in a row", name, trouble["failures"], exc_info=error)

    def _well(self, name: str) -> None:
        if trouble := self._troubles.pop(name, None):
            log.info("%s has recovered after %d failures", name, trouble["failures"])
