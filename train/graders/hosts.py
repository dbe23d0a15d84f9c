"""A worker for each owner who has something graded: code of one that runs for minutes keeps no other waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from train.graders.host import GraderHost

MAX_BUSY = 4
"""Owners who have something graded at the same time; others wait for one of them."""
MAX_IDLE = 2


@dataclass
class _Owner:
    host: GraderHost = field(default_factory=GraderHost)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """Requests that have its worker or wait for it."""


class GraderHosts:
    """`stop` them in the end. checks: reads code of graders of all owners, and runs none: nobody waits there for what
    runs for minutes."""

    def __init__(self) -> None:
        self.checks = GraderHost()
        self._owners: dict[str, _Owner] = {}
        self._free = asyncio.Semaphore(MAX_BUSY)

    @contextlib.asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[GraderHost]:
        """The owner's worker, alone. Its own requests wait for each other before they take a place from others."""
        mine = self._owners.setdefault(owner, _Owner())
        mine.wanted += 1
        try:
            async with mine.turn, self._free:
                yield mine.host
        finally:
            mine.wanted -= 1
            if not mine.wanted:
                self._owners[owner] = self._owners.pop(owner)  # the last one used stands last
                await self._end_idle()

    async def stop(self) -> None:
        await self.checks.stop()
        for one in list(self._owners.values()):
            await one.host.stop()

    async def _end_idle(self) -> None:
        # Looked at again after every wait: meanwhile one may be wanted again, or ended by another.
        while len(idle := [name for name, one in self._owners.items() if not one.wanted]) > MAX_IDLE:
            await self._owners.pop(idle[0]).host.stop()
