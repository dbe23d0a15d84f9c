"""Loads adapters that an engine misses from the nearest tier into shared memory.

Implements the box side of `serve.core.adapter_source.AdapterServer`; that file documents the protocol with the engines.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.store.database import Database
from appliance.store.objects import models
from appliance.tiers.tiers import Tiers, name_of
from serve.core.adapter_source import AdapterServer
from weights.format.errors import WeightsError
from weights.memory.store import Lease, WeightStore

AT_ONCE = 4
"""A tier elsewhere takes seconds for each, on threads that requests use too."""


class AdapterSource(AdapterServer):
    """Serves engines on the home node, and the nodes of engines elsewhere."""

    def __init__(self, path: Path, db: Database, store: WeightStore, tiers: Tiers) -> None:
        super().__init__(path, self._bring_in, (LookupError, WeightsError, OSError))
        self._db, self._store, self._tiers = db, store, tiers
        self._places = asyncio.Semaphore(AT_ONCE)

    async def _bring_in(self, model: str, version: str) -> Lease:
        row = models.find_version(self._db, model, version)
        if row is None or not row.meta.get("adapter"):
            raise LookupError(f"{model} {version} is not an adapter of this box")
        async with self._places:
            return self._store.lease(await asyncio.to_thread(self._tiers.bring_in, name_of(row)))
