"""Model versions for the engines: in shared memory when needed, on disk in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.config import BoxConfig
from appliance.controller.naming import resolve
from appliance.store import models
from appliance.store.database import Database
from appliance.store.rows import ModelRow
from scheduler.inventory import Device
from serve.sizing import engine_settings
from weights import tiers
from weights.errors import WeightsError
from weights.store import Lease, StoredVersion, WeightStore

log = logging.getLogger(__name__)


class VersionShelf:
    """Implements `scheduler.ray_effects.Versions`, and keeps a copy of every published version on disk.

    A version that is being served stays leased here, so that a budget never evicts what a waking engine needs next.
    """

    def __init__(self, db: Database, store: WeightStore, models_dir: Path, config: BoxConfig, device: Device):
        self._db, self._store, self._models_dir = db, store, models_dir
        self._config, self._device = config, device
        self._leases: dict[str, tuple[str, Lease]] = {}
        self._reading: dict[tuple[str, str], asyncio.Task[Path]] = {}
        self._saving: set[asyncio.Task[None]] = set()

    async def in_memory(self, model: str, version: str) -> Path:
        """The version's directory in shared memory. Raises LookupError when the box has no bytes of it."""
        key = (model, version)
        if key not in self._reading:
            self._reading[key] = asyncio.create_task(self._bring_in(model, version))
            self._reading[key].add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(self._reading[key])

    async def _bring_in(self, model: str, version: str) -> Path:
        owner = self._owner(model)
        stored = await asyncio.to_thread(self._store.find, "version", owner.id, version)
        if stored is None:
            row = models.find_version(self._db, owner.id, version)
            if row is None or row.disk_path is None:
                raise LookupError(f"{model} {version} is neither in shared memory nor on disk")
            stored = await asyncio.to_thread(
                self._store.import_dir, Path(row.disk_path), model=owner.id, version=version
            )
            models.update_version(self._db, owner.id, version, shm_path=str(stored.path))
        self._hold(model, stored)
        return stored.path

    def _owner(self, name: str) -> ModelRow:
        """The model whose bytes a public name means: its own, or for a checkpoint's name its model's."""
        found = resolve(self._db, name)
        if found is None:
            raise LookupError(f"there is no model {name} on this box any more")
        return found.model

    def _hold(self, name: str, stored: StoredVersion) -> None:
        old = self._leases.get(name)
        if old is not None and old[0] == stored.version:
            return
        self._leases[name] = (stored.version, self._store.lease(stored))
        if old is not None:
            old[1].release()

    def let_go(self, name: str) -> None:
        """No engine serves this name any more: its version may be evicted."""
        held = self._leases.pop(name, None)
        if held is not None:
            held[1].release()

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        row = self._owner(model)
        return engine_settings(
            self._config.serve,
            task=row.task,
            max_position_embeddings=row.max_model_len,
            weight_bytes=row.bytes,
            tensor_parallel=tensor_parallel,
            device_kind=self._device.kind,
            device_memory_bytes=self._device.memory_bytes,
        )

    # --- to disk ------------------------------------------------------------------------------------------------

    def save_soon(self, model: str, version: str) -> None:
        """Copy a version that only shared memory has to disk, in the background."""
        task = asyncio.create_task(self._save(model, version))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def save_all(self) -> None:
        """Returns when every version of the store's rows is on disk. Called before the box ends."""
        await asyncio.gather(*self._saving)
        for row in models.list_all(self._db):
            for version in models.list_versions(self._db, row.id):
                if version.disk_path is None:
                    await self._save(row.id, version.version)

    async def _save(self, model: str, version: str) -> None:
        stored = self._store.find("version", model, version)
        if stored is None:
            log.error("version %s of %s is neither in shared memory nor on disk", version, model)
            return
        target = self._models_dir / stored.path.parent.name / stored.path.name
        try:
            await asyncio.to_thread(
                tiers.persist, stored, target, rate_bytes_s=self._config.weights.persist_rate_bytes_s
            )
        except (OSError, WeightsError) as error:
            log.error("version %s of %s could not be saved to %s: %s", version, model, target, error)
            return
        if models.find_version(self._db, model, version) is not None:
            models.update_version(self._db, model, version, disk_path=str(target))
