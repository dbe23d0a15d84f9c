"""Provides model versions to engines: loads them into shared memory on demand, from the nearest tier with all their
bytes; deletes their bytes; sizes the engines; and asks vLLM whether an engine would start with given settings."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from appliance.config import BoxConfig
from appliance.controller.access.model_access import Resolved, resolve
from appliance.controller.interfaces.errors import OperationFailed
from appliance.models.errors import ModelError
from appliance.models.library import ModelLibrary
from appliance.paths import BoxPaths
from appliance.store import jobs, models, rows
from appliance.store.database import Database
from appliance.store.rows import ModelRow, VersionRow
from appliance.tiers.tiers import TierFlow, Tiers, name_of
from runtime.devices.kinds import kind_of
from runtime.errors import RuntimeLayerError
from runtime.processes.child import Child
from scheduler.core.workload import Device
from serve.core.adapter_source import AdapterServer
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from serve.core.sizing import EngineSize, ServedShape, adapter_rank_limit, engine_size
from serve.core.spec import ReplicaSpec
from weights.format.errors import VersionLeased, VersionNotFound, WeightsError
from weights.format.foreign_json import config_in
from weights.format.names import Name, policy_of
from weights.memory.lease import unpin
from weights.memory.store import Lease, WeightStore

if TYPE_CHECKING:
    from scheduler.ray.node import NodeConfig

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

GPU_ENGINE_BYTES = 4 * 2**30
"""Host memory of an engine whose tensors are on a GPU: Python, torch, the CUDA context, vLLM's buffers."""


class VersionProvider:
    """Implements `scheduler.ray.effects.Versions`.

    A version that an engine is about to load is leased here until the engine has a lease of its own (`taken`). A
    sleeping engine has none: its version can be evicted, and its wake reloads it.
    """

    def __init__(
        self, db: Database, store: WeightStore, tiers: Tiers, config: BoxConfig, device: Device, sizes: EngineSizes
    ):
        self._db, self._store, self._tiers = db, store, tiers
        self._sizes = sizes
        self._config, self._device = config, device
        self._leases = defaultdict[tuple[str, str], list[Lease]](list)  # {(model, version): leases}
        self._served: dict[str, str] = {}  # {model: version last requested}
        self._locks: WeakValueDictionary[Name, asyncio.Lock] = WeakValueDictionary()

    async def in_memory(self, model: str, version: str) -> Path:
        name = Name("version", model if policy_of(model) is not None else self._resolve(model).model.id, version)
        async with self._locks.setdefault(name, asyncio.Lock()):  # if engines start together, only the first one reads
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
        """Return the model with this name; for a model in training its base, which has the same engine settings."""
        job = jobs.find(self._db, policy_of(name) or "")
        resolved = resolve(self._db, name if job is None else job.model)
        if resolved is None:
            raise LookupError(f"there is no model {name} on this box any more")
        return resolved

    def holds(self, name: Name) -> bool:
        """Return whether an engine serves this version or is about to. May be called from any thread."""
        for model, version in (*self._served.items(), *self._leases):
            if version == name.version and (resolved := resolve(self._db, model)) is not None:
                if resolved.model.id == name.model:
                    return True
        return False

    def let_go(self, name: str) -> None:
        """Release a model's bytes for eviction, once no engine serves the model by its name or a version's name."""
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
        """Return the host memory for one more engine of this model: the process, its version unless in shared memory
        already, and on logical CPU devices a copy of the weights and the KV cache."""
        try:
            resolved = self._resolve(model)
        except LookupError:
            return 0  # the engine's start will report the error
        row, version = resolved.model, resolved.version
        shared = 0 if self._store.find("version", row.id, version.version) is not None else row.bytes
        if not kind_of(self._device.kind).on_host:
            return shared + GPU_ENGINE_BYTES
        devices = self._sizes.devices(row.id)
        return shared + devices * self._sizes.size(row, version, devices).memory.device_bytes


class AdapterSource(AdapterServer):
    """Loads adapters that an engine lacks from the nearest tier into shared memory, for engines on the home node and
    for other nodes."""

    def __init__(self, path: Path, db: Database, store: WeightStore, tiers: Tiers) -> None:
        super().__init__(path, self._bring_in, (LookupError, WeightsError, OSError))
        self._db, self._store, self._tiers = db, store, tiers

    async def _bring_in(self, model: str, version: str) -> Lease:
        row = models.find_version(self._db, model, version)
        if row is None or not row.meta.get("adapter"):
            raise LookupError(f"{model} {version} is not an adapter of this box")
        return self._store.lease(await asyncio.to_thread(self._tiers.bring_in, name_of(row)))


@dataclass(frozen=True)
class LibraryOps:
    """Long operations on files of models, on threads. All raise OperationFailed for errors that a user can act on. Rows
    in the store are the callers' responsibility.

    let_go: releases the box's own leases on a model. elsewhere: makes other nodes remove their copies of deleted
    versions."""

    library: ModelLibrary
    store: WeightStore
    flow: TierFlow
    let_go: Callable[[str], None]
    elsewhere: Callable[[list[Name]], Awaitable[None]]

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(work, *arguments, **named)
        except (ModelError, WeightsError, OSError) as error:
            # The code is the error's class name: CheckpointRefused -> checkpoint_refused.
            code = "".join("_" + c.lower() if c.isupper() else c for c in type(error).__name__).lstrip("_")
            raise OperationFailed(str(error), code=code) from error

    async def remove(self, model: str, rows: Sequence[VersionRow]) -> None:
        """Delete the bytes of these versions. Idempotent."""
        self.let_go(model)
        names = [name_of(row) for row in rows]
        for name in names:
            await self.run(self.library.remove, name.model, name.version)
            await self._forget(name)
            self.flow.forget(name)
        await self.elsewhere(names)

    async def _forget(self, name: Name) -> None:
        """Remove a version from shared memory. If it has readers, eviction removes it later."""
        if (stored := await self.run(self.store.find, *name)) is None:
            return
        try:
            await asyncio.to_thread(self.store.remove, stored)
        except VersionNotFound:
            return
        except VersionLeased as error:
            log.info("%s was deleted and leaves shared memory later: %s", name, error)
            await self.run(unpin, stored)


# --- sizes of engines (memory and context), and vLLM's own check of their settings


class EngineSizes:
    """devices: returns the devices that engines may use now, at least one. An engine is sized for the smallest: it may
    be placed on any device, and all engines of a model must have the same context.
    """

    def __init__(
        self, db: Database, engine: EngineConfig, devices: Callable[[], Iterable[Device]], asleep_per_device: int
    ):
        self._db, self._engine, self._devices = db, engine, devices
        self._asleep_per_device = asleep_per_device
        self._shapes: dict[tuple[str, str], ServedShape] = {}

    def size(
        self,
        model: ModelRow,
        version: VersionRow | None,
        tensor_parallel: int | None = None,
        settings: ModelSettings | None = None,
    ) -> EngineSize:
        """Size an engine of this version; bytes are per device. Devices and settings default to the deployment's and
        those in force. An adapter has the size of its base's engine."""
        model, version = self._served(model, version)
        device = min(self._devices(), key=lambda device: device.memory_bytes)
        return engine_size(
            self._engine,
            self._shape(model, version),
            task=model.task,
            arch=model.arch,
            tensor_parallel=tensor_parallel or self.devices(model.id),
            device_kind=device.kind,
            device_memory_bytes=device.memory_bytes,
            device_name=device.name,
            asleep_per_device=self._asleep_per_device,
            settings=settings or self._settings(model),
        )

    def devices(self, model: str) -> int:
        """Return the number of devices of each engine of this model."""
        row = rows.DEPLOYMENTS.find(self._db, model)
        return row.tensor_parallel if row is not None else 1

    def _settings(self, model: ModelRow) -> ModelSettings:
        row = models.current_settings(self._db, model.id)
        return ModelSettings() if row is None else ModelSettings.model_validate(row.settings)

    def spec_fields(
        self, model: ModelRow, version: VersionRow | None, tensor_parallel: int, settings: ModelSettings | None = None
    ) -> dict[str, Any]:
        """Return the fields of an engine's ReplicaSpec. Raises serve.core.sizing.NotServable."""
        model, version = self._served(model, version)
        settings = settings or self._settings(model)
        size = self.size(model, version, tensor_parallel, settings)
        return {"task": model.task} | size.spec_fields() | settings.spec_fields()

    def adapter_rank_limit(self, model: ModelRow) -> int:
        """Return the largest LoRA rank that engines of this model accept; 0: they take no adapters."""
        return adapter_rank_limit(self._engine, task=model.task, arch=model.arch)

    def _served(self, model: ModelRow, version: VersionRow | None) -> tuple[ModelRow, VersionRow | None]:
        version = version or models.active(self._db, model)
        adapter = version.meta.get("adapter") if version is not None else None
        base = models.find(self._db, adapter["base"]) if adapter else None
        if adapter is None or base is None:
            return model, version
        return base, models.find_version(self._db, base.id, adapter["base_version"])

    def _shape(self, model: ModelRow, version: VersionRow | None) -> ServedShape:
        """Return the model's shape from the version's config.json, or else from the model's row in the store."""
        bare = ServedShape(model.bytes, model.params, context=model.max_model_len)
        if version is None:
            return bare
        key = (model.id, version.version)
        if key not in self._shapes:
            config = config_in(version.disk_path, version.shm_path)
            if config is not None:
                self._shapes[key] = ServedShape.from_config(config, version.bytes or model.bytes, model.params)
        return self._shapes.get(key, bare)


ENTRY = "serve.engine.main:check_settings"
TIMEOUT_S = 60.0


class SettingsCheck:
    """Checks settings in a process that has vLLM imported, one check at a time."""

    def __init__(self, sizes: EngineSizes, home: NodeConfig, device: Device):
        self._sizes, self._home, self._device = sizes, home, device
        self._one = asyncio.Lock()

    async def refused(self, model: ModelRow, version: VersionRow, devices: int, settings: ModelSettings) -> str:
        """Return why vLLM would not start an engine, "" if it would. Raises OperationFailed if it cannot be asked."""
        folder = next(
            (f for f in (version.shm_path, version.disk_path) if f and Path(f, "config.json").is_file()), None
        )
        if folder is None:
            where = f"Version {version.version} of {model.id} is neither in memory nor on disk now"
            why = f"{where}, so vLLM cannot be asked about its settings"
            raise OperationFailed(f"{why}; ask the model something and try again.")
        check_id = f"check-{uuid.uuid4().hex[:8]}"
        spec = ReplicaSpec(
            replica_id=check_id,
            model=model.id,
            version=version.version,
            version_path=str(folder),
            socket_path=str(self._home.socket_path(check_id)),
            devices=tuple(range(devices)),
            kind=self._device.kind,
            shm_root=str(self._home.shm_root),
            tensor_parallel=devices,
            **self._sizes.spec_fields(model, version, devices, settings),
        )
        warm, log_path = self._home.warm_socket("serve"), Path(self._home.log_dir) / "settings-check.log"
        try:
            async with self._one:
                child = await Child.spawn(warm, ENTRY, {"spec": spec.to_json()}, log_path=log_path, name=check_id)
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        event: dict[str, Any] | None = await child.next_event()
                finally:
                    await child.kill_and_wait()
        except (RuntimeLayerError, TimeoutError) as error:
            why = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
            raise OperationFailed(f"vLLM cannot be asked about these settings now: {why}") from error
        if event is None:
            raise OperationFailed("The process that checks settings has ended; settings-check.log says more.")
        return str(event["refused"]) if event["event"] == "checked" else f"{event['type']}: {event['message']}"
