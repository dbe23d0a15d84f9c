"""Provides model versions to engines: in shared memory on demand, from the nearest tier that has them whole; and
deletes their bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from appliance.config import BoxConfig
from appliance.controller.access.model_access import Resolved, resolve
from appliance.controller.engines.engine_sizes import EngineSizes
from appliance.controller.interfaces.errors import OperationFailed
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary
from appliance.paths import BoxPaths
from appliance.store import jobs, models
from appliance.store.database import Database
from appliance.store.rows import VersionRow
from appliance.tiers.tiers import TierFlow, Tiers, name_of
from runtime.devices.kinds import kind_of
from scheduler.core.workload import Device
from serve.core.adapter_source import AdapterServer
from weights.format.errors import VersionLeased, VersionNotFound, WeightsError
from weights.format.names import Name, policy_of
from weights.memory.lease import unpin
from weights.memory.store import Lease, WeightStore

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

GPU_ENGINE_BYTES = 4 * 2**30
"""Host memory of an engine whose tensors are on a GPU: Python, torch, the CUDA context, vLLM's buffers."""

READERS_LEAVE_S = 30.0
"""For an engine that is unloading an adapter, or a copy to a tier, before a deleted version is left to eviction."""
AT_ONCE = 4
"""A tier elsewhere takes seconds for each, on threads that requests use too."""


class VersionProvider:
    """Implements `scheduler.ray.effects.Versions`.

    A version that an engine is about to load is leased here until the engine has a lease of its own (`taken`). A
    sleeping engine has none: its version can be evicted like any other without a reader, least recently used first,
    and its wake reloads it.
    """

    def __init__(
        self, db: Database, store: WeightStore, tiers: Tiers, config: BoxConfig, device: Device, sizes: EngineSizes
    ):
        self._db, self._store, self._tiers = db, store, tiers
        self._sizes = sizes
        self._config, self._device = config, device
        self._leases = defaultdict[tuple[str, str], list[Lease]](list)  # by model and version
        self._served: dict[str, str] = {}  # by model, the version that was asked for last
        self._locks: WeakValueDictionary[Name, asyncio.Lock] = WeakValueDictionary()

    async def in_memory(self, model: str, version: str) -> Path:
        name = Name("version", model if policy_of(model) is not None else self._resolve(model).model.id, version)
        async with self._locks.setdefault(name, asyncio.Lock()):  # engines that start at once: the first one reads it
            try:
                stored = await asyncio.to_thread(self._tiers.bring_in, name)
                lease = self._store.lease(stored)
            except WeightsError as error:
                raise LookupError(str(error)) from error
        self._served[model] = version
        self._leases[model, version].append(lease)
        return stored.path

    def taken(self, model: str, version: str) -> None:
        if leases := self._leases.get((model, version)):
            leases.pop().release()
            if not leases:
                del self._leases[model, version]

    def _resolve(self, name: str) -> Resolved:
        """The model of this name; of a model in training its base, whose engines are set up alike."""
        job = jobs.find(self._db, policy_of(name) or "")
        resolved = resolve(self._db, name if job is None else job.model)
        if resolved is None:
            raise LookupError(f"there is no model {name} on this box any more")
        return resolved

    def holds(self, name: Name) -> bool:
        """Whether an engine serves this version, or is about to. May be called from any thread."""
        for model, version in (*self._served.items(), *self._leases):
            if version == name.version and (resolved := resolve(self._db, model)) is not None:
                if resolved.model.id == name.model:
                    return True
        return False

    def let_go(self, name: str) -> None:
        """No engine serves this model any more, under its own name or a version's: release its bytes for eviction."""
        for known in [known for known in self._served if known == name or known.startswith(f"{name}@")]:
            del self._served[known]
        for key in [key for key in self._leases if key[0] == name or key[0].startswith(f"{name}@")]:
            for lease in self._leases.pop(key):
                lease.release()

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        resolved = self._resolve(model)
        row = resolved.model
        settings = self._sizes.spec_fields(row, resolved.version, tensor_parallel)
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
        try:
            resolved = self._resolve(model)
        except LookupError:
            return 0  # its start will report the error
        row, version = resolved.model, resolved.version
        shared = 0 if self._store.find("version", row.id, version.version) is not None else row.bytes
        if not kind_of(self._device.kind).on_host:
            return shared + GPU_ENGINE_BYTES
        devices = self._sizes.devices(row.id)
        return shared + devices * self._sizes.size(row, version, devices).memory.device_bytes


class AdapterSource(AdapterServer):
    """Loads adapters that an engine misses from the nearest tier into shared memory: for engines on the home node, and
    the nodes of engines elsewhere."""

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


class LibraryOps:
    """Long operations on files of models, on threads. All raise OperationFailed for errors that a user can act on. Rows
    in the store are the callers' responsibility.

    let_go: gives up the box's own leases on a model. elsewhere: has other nodes remove their copies of what is
    deleted."""

    def __init__(
        self,
        library: ModelLibrary,
        store: WeightStore,
        flow: TierFlow,
        let_go: Callable[[str], None],
        elsewhere: Callable[[list[Name]], Awaitable[None]],
    ):
        self.library, self._store, self._flow = library, store, flow
        self.let_go, self._elsewhere = let_go, elsewhere

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(work, *arguments, **named)
        except (ModelError, WeightsError, OSError) as error:
            # For programs, the error's own name: CheckpointRefused -> checkpoint_refused.
            code = "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")
            raise OperationFailed(str(error), code=code) from error

    async def remove(self, model: str, rows: Sequence[VersionRow]) -> None:
        """Delete the bytes of these versions. Idempotent."""
        self.let_go(model)
        names = [name_of(row) for row in rows]
        for name in names:
            await self.run(self.library.remove, name.model, name.version)
            await self._forget(name)
            self._flow.forget(name)
        await self._elsewhere(names)

    async def _forget(self, name: Name) -> None:
        """Remove it from shared memory once it has no readers. If readers stay, eviction removes it later."""
        until_s = time.monotonic() + READERS_LEAVE_S
        while (stored := await self.run(self._store.find, *name)) is not None:
            try:
                await asyncio.to_thread(self._store.remove, stored)
            except VersionNotFound:
                return
            except VersionLeased as error:
                if time.monotonic() > until_s:
                    log.warning("%s was deleted, but %s", name, error)
                    await self.run(unpin, stored)
                    return
                await asyncio.sleep(0.05)
