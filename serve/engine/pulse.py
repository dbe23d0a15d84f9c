"""Notices an engine that hangs: its core, which answers between two steps, stays silent for too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from runtime.errors import ChildDied, ChildError

EVERY_S = 2.0
SILENT_S = 6.0
"""Gateways prefer other replicas to one that has been silent for this long. One that stops just after a sign of life is
noticed within SILENT_S and two EVERY_S."""


class Pulse:
    """Watches one engine. `ask` returns once its core answers; `limit_s`: silence after which the engine counts as
    hung, longer than any step takes."""

    def __init__(self, ask: Callable[[], Awaitable[object]], limit_s: float):
        self._ask, self._limit_s = ask, limit_s
        self._silent_s = 0.0
        self._polled = asyncio.Event()
        self.held = 0  # operations under way, which have limits of their own

    @property
    def silent(self) -> bool:
        """Whether the engine has been silent for so long that others should be preferred."""
        return self._silent_s >= SILENT_S

    async def changed(self, silent: bool) -> bool:
        """Returns `silent` once it is no longer what was given."""
        while self.silent == silent:
            await self._polled.wait()
        return self.silent

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """While an operation is under way, silence is not held against the engine."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def watch(self) -> str:
        """Returns why the engine counts as hung, or "" once it is dead."""
        while True:
            await asyncio.sleep(EVERY_S)
            # One question at a time, so that none pile up in a stopped engine.
            answer = asyncio.ensure_future(self._ask())
            try:
                while not answer.done():
                    await asyncio.wait({answer}, timeout=EVERY_S)
                    # Polls, not time, are counted: the supervisor may have been stopped as well.
                    self._note(0.0 if self.held else self._silent_s + EVERY_S)
                    if self._silent_s >= self._limit_s and not answer.done():
                        return f"it hung: no sign of life for {self._silent_s:.0f} s"
                answer.result()
            except ChildDied:
                return ""
            except ChildError:
                pass  # an answer too; a core that died ends the engine by itself
            finally:
                answer.cancel()
                self._note(0.0)

    def _note(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._polled.set()
        self._polled = asyncio.Event()
