"""A worker for each owner whose answers are being graded: one owner's code that runs for minutes keeps no other
waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from train.graders.host import GraderHost

MAX_BUSY = 4
"""How many owners may have workers at the same time; others wait for one of them."""
MAX_IDLE = 2


@dataclass
class _Owner:
    host: GraderHost = field(default_factory=GraderHost)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """Requests that have its worker or wait for it."""


class GraderHosts:
    """`stop` them in the end."""

    def __init__(self) -> None:
        self._reader = GraderHost()
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
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

    async def unusable(self, owner: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """`GraderHost.unusable`, by one worker for all owners, apart from those that grade for minutes. Requests of an
        owner wait for each other first, because code can take the whole time limit."""
        async with self._reading.setdefault(owner, asyncio.Lock()):
            return await self._reader.unusable(sources)

    async def refused_schema(self, owner: str, schema: Mapping[str, Any]) -> str:
        """Why it is not a JSON schema, "" if it is one; in turns like code. Raises WorkerBroke."""
        async with self._reading.setdefault(owner, asyncio.Lock()):
            # The empty object may lack what the schema requires: only the verdict on the schema counts here.
            found = await self._reader.refused_items(dict(schema), [{}])
        return next((why for place, why in found if place < 0), "")

    async def stop(self) -> None:
        await self._reader.stop()
        for one in list(self._owners.values()):
            await one.host.stop()

    async def _end_idle(self) -> None:
        # Check again after every wait: meanwhile a worker may be wanted again, or ended by another task.
        while len(idle := [name for name, one in self._owners.items() if not one.wanted]) > MAX_IDLE:
            await self._owners.pop(idle[0]).host.stop()
