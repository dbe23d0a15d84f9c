"""Adapters for engines that do not find them: from whatever tier has them, into shared memory.

The other end of `serve.adapter_source`, which says how the two talk.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from appliance.store import models
from appliance.store.database import Database
from appliance.wiring.tier_facts import name_of
from appliance.wiring.tier_flow import TierFlow
from runtime.sockets import owner_only
from serve.adapter_source import LINE_BYTES
from weights.errors import WeightsError
from weights.store import StoredVersion, WeightStore

log = logging.getLogger(__name__)


class AdapterSource:
    """Serves engines from `start` to `stop`; all methods belong to one event loop."""

    def __init__(self, path: Path, db: Database, store: WeightStore, flow: TierFlow) -> None:
        self._path, self._db, self._store, self._flow = path, db, store, flow
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. A socket file that a killed controller left is replaced."""
        self._path.unlink(missing_ok=True)
        with owner_only():
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_BYTES)

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._open):
            writer.close()
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            question = json.loads(await reader.readline())
            await self._answer(question["adapter"], reader, writer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a question for an adapter was none: %r", error)
        except OSError as error:
            log.info("an engine left before it had its adapter: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, adapter: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        model, _, version = adapter.rpartition("@")
        try:
            lease = self._store.lease(await self._bring_in(model, version))
        except (LookupError, WeightsError, OSError) as error:
            log.error("an engine asked for the adapter %s: %s", adapter, error)
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
            await writer.drain()
            return
        with lease:
            writer.write(json.dumps({"path": str(lease.path)}).encode() + b"\n")
            await reader.read()  # until the engine has a lease of its own, and hangs up

    async def _bring_in(self, model: str, version: str) -> StoredVersion:
        row = models.find_version(self._db, model, version)
        if row is None or not row.meta.get("adapter"):
            raise LookupError(f"{model} {version} is no adapter of this box")
        return await asyncio.to_thread(self._flow.bring_in, name_of(row))
