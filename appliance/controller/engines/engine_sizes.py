"""Sizes the engines of this box's models: memory and context, for everybody who asks (plans, views, admission, the
gateways' table, the engines themselves); and asks vLLM whether it would start an engine with given settings."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.controller.interfaces.errors import OperationFailed
from appliance.store import models
from appliance.store.database import Database
from appliance.store.rows import DEPLOYMENTS, ModelRow, VersionRow
from runtime.errors import RuntimeLayerError
from runtime.processes.child import Child
from scheduler.core.workload import Device
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from serve.core.sizing import EngineSize, ServedShape, adapter_rank_limit, engine_size
from serve.core.spec import ReplicaSpec
from weights.format.foreign_json import config_in

if TYPE_CHECKING:
    from scheduler.ray.node import NodeConfig


class EngineSizes:
    """devices: those that engines may be on now, one at least. Where they differ, an engine is sized for the smallest:
    it may be placed on any, and all engines of a model answer to the same context.
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
        """An engine of this version, over the devices of its deployment and with the settings in force unless others
        are given; bytes are per device. An adapter's is its base model's."""
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
        """How many devices an engine of this model has."""
        row = DEPLOYMENTS.find(self._db, model)
        return row.tensor_parallel if row is not None else 1

    def _settings(self, model: ModelRow) -> ModelSettings:
        row = models.current_settings(self._db, model.id)
        return ModelSettings() if row is None else ModelSettings.model_validate(row.settings)

    def spec_fields(
        self, model: ModelRow, version: VersionRow | None, tensor_parallel: int, settings: ModelSettings | None = None
    ) -> dict[str, Any]:
        """Fields of the ReplicaSpec of an engine. Raises serve.core.sizing.NotServable."""
        model, version = self._served(model, version)
        settings = settings or self._settings(model)
        size = self.size(model, version, tensor_parallel, settings)
        return {"task": model.task} | size.spec_fields() | settings.spec_fields()

    def adapter_rank_limit(self, model: ModelRow) -> int:
        """The largest LoRA rank that engines of this model accept; 0: none."""
        return adapter_rank_limit(self._engine, task=model.task, arch=model.arch)

    def _served(self, model: ModelRow, version: VersionRow | None) -> tuple[ModelRow, VersionRow | None]:
        version = version or models.active(self._db, model)
        adapter = version.meta.get("adapter") if version is not None else None
        base = models.find(self._db, adapter["base"]) if adapter else None
        if adapter is None or base is None:
            return model, version
        return base, models.find_version(self._db, base.id, adapter["base_version"])

    def _shape(self, model: ModelRow, version: VersionRow | None) -> ServedShape:
        """From the version's config.json; without its files only what the store knows of the model."""
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
    """Asks in a process that has vLLM imported, one check at a time."""

    def __init__(self, sizes: EngineSizes, home: NodeConfig, device: Device):
        self._sizes, self._home, self._device = sizes, home, device
        self._one = asyncio.Lock()

    async def refused(self, model: ModelRow, version: VersionRow, devices: int, settings: ModelSettings) -> str:
        """Why vLLM would not start it, "" if it would. Raises OperationFailed if it cannot be asked now."""
        folder = next(
            (f for f in (version.shm_path, version.disk_path) if f and Path(f, "config.json").is_file()), None
        )
        if folder is None:
            raise OperationFailed(
                f"Version {version.version} of {model.id} is neither in memory nor on disk now, so vLLM cannot be "
                "asked about its settings; ask the model something and try again."
            )
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
