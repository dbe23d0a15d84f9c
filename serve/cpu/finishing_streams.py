"""Tracks, in the engine's API process, requests that finish on the old version after a staged swap.

begin       the engine core exchanged the versions and left its requests on the old one
...         they end by themselves; or their time or the host's memory runs out; or a caller that needs the engine to
            hold one version calls `end`: then the engine recomputes the rest with the new version
over        the core freed the old weights; this class releases its lease and logs the outcome
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from serve.cpu.finishing import SHORT_OF_MEMORY, why_move
from weights.memory.locks import DirectoryLock

POLL_S = 1.0
logger = logging.getLogger(__name__)


class FinishingStreams:
    """Owns the old version's lease until no request needs its weights. `lock` allows one engine operation at a time;
    `memory` returns the host's (available bytes, total bytes)."""

    def __init__(self, llm: AsyncLLM, lock: asyncio.Lock, timeout_s: float, memory: Callable[[], tuple[int, int]]):
        self._llm, self._lock, self._timeout_s, self._memory = llm, lock, timeout_s, memory
        self._over: asyncio.Task[None] | None = None
        self._held: DirectoryLock | None = None
        self._why: str | None = None
        self._moving = False
        self.version: str | None = None
        self.last: dict[str, Any] | None = None

    def begin(self, model: str, version: str, held: DirectoryLock | None) -> None:
        """Call right after the exchange that left requests on `version`, whose lease is `held`."""
        self.version, self._held, self._why = version, held, None
        self._over = asyncio.create_task(self._until_over(model, version))

    async def end(self, why: str) -> None:
        """Return once one version is in memory; `why`: the reason logged if requests had to move. Call with the lock
        held."""
        over = self._over
        if over is not None:
            await self._move(why)
            await over

    async def _until_over(self, model: str, version: str) -> None:
        bound = asyncio.create_task(self._move_in_time())
        try:
            outcome = await self._llm.engine_core.call_utility_async("shm_finished")
            why = self._why if outcome["moved"] else None
            await self._llm.engine_core.call_utility_async("shm_end_finishing", why == SHORT_OF_MEMORY)
        except EngineDeadError:  # the engine's process ends by itself (serve.engine.main)
            return
        finally:
            if not self._moving:  # a cancelled move would resume the engine during the next operation
                bound.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
                await bound
            self._over, self._held, self.version = None, None, None
        self.last = {"version": version, **outcome, "why": why}
        moved = f", {outcome['moved']} moved on: {why}" if outcome["moved"] else ""
        logger.info(
            "%d requests finished on %s in %.1f s after the swap%s",
            outcome["finished"],
            version,
            outcome["seconds"],
            moved,
            extra={"model": model, "version": version},
        )

    async def _move_in_time(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            free_bytes, total_bytes = self._memory()
            now_s = time.monotonic()
            why = why_move(now_s=now_s, deadline_s=deadline_s, free_bytes=free_bytes, total_bytes=total_bytes)
            if why is not None:
                async with self._lock:
                    self._moving = True
                    try:
                        await self._move(why)
                    finally:
                        self._moving = False
                return
            await asyncio.sleep(min(POLL_S, max(deadline_s - now_s, 0)))

    async def _move(self, why: str) -> None:
        # Set before the call: the resulting end event arrives before the call's answer.
        self._why = self._why or why
        await self._llm.engine_core.call_utility_async("shm_move_finishing")
