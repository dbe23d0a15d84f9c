"""Tells an engine that hangs from one that computes for long. Pure, but for `Pulse.watch`.

The supervisor asks the engine's core for a sign of life, which the core gives between two steps. Silence alone proves
nothing: one step may take minutes on a slow processor. So while an engine is silent, what its processes do decides. An
engine whose processes neither run nor read nor wait for a processor hangs (stopped, or each waits for another); so does
one of which a single process is stopped. One that computes may do so much longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

from runtime.errors import ChildDied, ChildError
from runtime.processes.kernel import Vitals

EVERY_S = 2.0
SILENT_S = 6.0
"""Gateways prefer other replicas to one that has been silent for this long. One that stops just after a sign of life is
found out within SILENT_S and two EVERY_S."""
WORKING = 0.02
"""The share of one processor that counts as work. Idle timers of an engine's processes take a tenth of it at most."""


class Silence:
    """One wait for one sign of life. Times in seconds."""

    def __init__(self, vitals: Vitals, idle_limit_s: float, busy_limit_s: float):
        self._vitals, self._idle_limit_s, self._busy_limit_s = vitals, idle_limit_s, busy_limit_s
        self.total_s = self.idle_s = 0.0

    def look(self, vitals: Vitals, passed_s: float) -> str | None:
        """Take in what the processes are at, `passed_s` after the last look. Returns why the engine counts as hung."""
        # Whoever looks may have been stopped as well: what passed unseen is held against nobody.
        passed_s = min(passed_s, 2 * EVERY_S)
        used_s = vitals.cpu_s - self._vitals.cpu_s
        works = not vitals.stopped and (vitals.waits or used_s > WORKING * passed_s)
        self._vitals = vitals
        self.total_s += passed_s
        self.idle_s = 0.0 if works else self.idle_s + passed_s
        if self.idle_s >= self._idle_limit_s:
            what = "a process of it is stopped" if vitals.stopped else "its processes do nothing"
            return f"it hung: no sign of life for {self.total_s:.0f} s, and {what}"
        if self.total_s >= self._busy_limit_s:
            return f"it hung: no sign of life for {self.total_s:.0f} s, although its processes run"
        return None


class Pulse:
    """Watches one engine. `ask` returns once its core answers; `vitals` reads what its processes are at."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        vitals: Callable[[], Vitals],
        idle_limit_s: float,
        busy_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._ask, self._read, self._clock = ask, vitals, clock
        self._limits = idle_limit_s, busy_limit_s
        self._silence: Silence | None = None
        self._looked = asyncio.Event()
        self.held = 0  # operations under way, which have limits of their own

    @property
    def silent(self) -> bool:
        """Whether the engine has been silent for so long that others should be preferred."""
        return self._silence is not None and self._silence.total_s >= SILENT_S

    async def changed(self, silent: bool) -> bool:
        """Returns `silent` once it is no longer what was given."""
        while self.silent == silent:
            await self._looked.wait()
        return self.silent

    def _tell(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

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
            answer = asyncio.ensure_future(self._ask())
            try:
                if why := await self._until(answer):
                    return why
            except ChildDied:
                return ""
            except ChildError:
                pass  # an answer too; a core that died ends the engine by itself
            finally:
                answer.cancel()
                self._silence = None
                self._tell()

    async def _until(self, answer: asyncio.Future[object]) -> str | None:
        """Wait for one sign of life. Only one is asked for at a time, so that none pile up in a stopped engine."""
        seen_s = self._clock()
        silence = self._silence = Silence(await asyncio.to_thread(self._read), *self._limits)
        while True:
            await asyncio.wait({answer}, timeout=EVERY_S)
            if answer.done():
                answer.result()
                return None
            vitals, now_s = await asyncio.to_thread(self._read), self._clock()
            if self.held:
                silence = self._silence = Silence(vitals, *self._limits)
            elif why := silence.look(vitals, now_s - seen_s):
                return why
            seen_s = now_s
            self._tell()
