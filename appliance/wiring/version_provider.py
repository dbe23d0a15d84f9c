"""Provides model versions to engines: in shared memory on demand, from the nearest tier that has them whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.config import BoxConfig
from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.interfaces.ports import EngineSizer
from appliance.models.opening import Opening
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.store.records import deployments
from appliance.store.rows import ModelRow
from appliance.tiers.tiers import Tiers
from runtime.devices.kinds import kind_of
from scheduler.core.inventory import Device
from serve.core.sizing import adapter_rank_limit
from weights.format.errors import WeightsError
from weights.memory.store import Lease, StoredVersion, WeightStore
from weights.tiers.record import Name

GPU_ENGINE_BYTES = 4 * 2**30
"""Host memory of an engine whose tensors are on a GPU: Python, torch, the CUDA context, vLLM's buffers."""


class VersionProvider:
    """Implements `scheduler.ray.replicas.Versions`.

    A version that an engine is about to load is leased here until the engine has a lease of its own (`taken`). A
    sleeping engine has none: its version can be evicted like any other that nobody reads, least recently used first,
    and its wake reloads it.
    """

    def __init__(
        self,
        db: Database,
        store: WeightStore,
        tiers: Tiers,
        opening: Opening,
        config: BoxConfig,
        device: Device,
        sizes: EngineSizer,
    ):
        self._db, self._store, self._tiers, self._opening = db, store, tiers, opening
        self._sizes = sizes
        self._config, self._device = config, device
        self._leases: dict[str, tuple[str, Lease]] = {}
        self._reading: dict[tuple[str, str], asyncio.Task[Path]] = {}
        self._awaited: Counter[str] = Counter()

    async def in_memory(self, model: str, version: str) -> Path:
        key = (model, version)
        if key not in self._reading:
            self._reading[key] = asyncio.create_task(self._bring_in(model, version))
            self._reading[key].add_done_callback(lambda _: self._reading.pop(key, None))
        self._awaited[model] += 1
        try:
            return await asyncio.shield(self._reading[key])
        except BaseException:
            self.taken(model)
            raise

    async def _bring_in(self, model: str, version: str) -> Path:
        owner = self._owner(model)
        name = Name("version", owner.id, version)
        try:
            stored = await asyncio.to_thread(self._tiers.bring_in, name)
            await self._opening.check(stored.path, owner.id)
        except WeightsError as error:
            raise LookupError(str(error)) from error
        self._hold(model, stored)
        return stored.path

    def taken(self, model: str) -> None:
        self._awaited[model] -= 1
        if self._awaited[model] <= 0:
            del self._awaited[model]
            if model in self._leases:
                self._leases[model][1].release()

    def _owner(self, name: str) -> ModelRow:
        """The model behind a public name: itself, or for a checkpoint's name the model of the checkpoint."""
        return self._found(name).model

    def _found(self, name: str) -> Resolved:
        found = resolve(self._db, name)
        if found is None:
            raise LookupError(f"there is no model {name} on this box any more")
        return found

    def _hold(self, name: str, stored: StoredVersion) -> None:
        old = self._leases.get(name)
        if old is not None and old[0] == stored.version and not old[1].released:
            return
        self._leases[name] = (stored.version, self._store.lease(stored))
        if old is not None:
            old[1].release()

    def holds(self, name: Name) -> bool:
        """Whether an engine serves this version, or is about to. May be called from any thread."""
        return any(
            version == name.version and self._owner_id(model) == name.model
            for model, (version, _) in list(self._leases.items())
        )

    def _owner_id(self, name: str) -> str | None:
        found = resolve(self._db, name)
        return None if found is None else found.model.id

    def let_go(self, name: str) -> None:
        """No engine serves this model any more, under its own name or a version's: release its bytes for eviction."""
        for known in [known for known in self._leases if known == name or known.startswith(f"{name}@")]:
            self._leases.pop(known)[1].release()

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        found = self._found(model)
        row = found.model
        settings = self._sizes.spec_fields(row, found.version, tensor_parallel)
        if settings.get("adapter_slots"):
            paths = BoxPaths.of(Path(self._config.box.data_dir))
            settings["adapter_roots"] = (str(self._store.root / "adapters"), str(paths.models))
            settings["adapter_source"] = str(paths.adapter_socket)
        if self._config.observability.otlp_endpoint is not None:
            settings["otlp_endpoint"] = self._config.observability.otlp_endpoint
        return settings

    def host_bytes(self, model: str) -> int:
        """Host memory that one more engine of this model takes: the process, its version unless already in shared
        memory, and on logical CPU devices its own copy of the weights and the KV cache."""
        found = resolve(self._db, model)
        if found is None:
            return 0  # its start will report the error
        row, version = found.model, found.version
        shared = 0 if self._store.find("version", row.id, version.version) is not None else row.bytes
        if not kind_of(self._device.kind).on_host:
            return shared + GPU_ENGINE_BYTES
        deployment = deployments.find(self._db, row.id)
        devices = deployment.tensor_parallel if deployment is not None else 1
        return shared + devices * self._sizes.size(row, version, devices).memory.device_bytes

    def adapter_rank_limit(self, row: ModelRow) -> int:
        """The largest LoRA rank that engines of this model accept; 0: none."""
        return adapter_rank_limit(self._config.serve, task=row.task, arch=row.arch)
