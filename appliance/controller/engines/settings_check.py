"""Asks vLLM, in a process that has it imported, whether it would start an engine with these settings."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.controller.engines.engine_sizes import EngineSizes
from appliance.controller.interfaces.errors import OperationFailed
from appliance.store.rows import ModelRow, VersionRow
from runtime.errors import RuntimeLayerError
from runtime.processes.child import Child
from scheduler.core.inventory import Device
from serve.core.model_settings import ModelSettings
from serve.core.spec import ReplicaSpec

if TYPE_CHECKING:
    from scheduler.ray.node import NodeConfig

ENTRY = "serve.engine.main:check_settings"
TIMEOUT_S = 60.0


class SettingsCheck:
    """One check at a time."""

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
        async with self._one:
            return await self._ask(spec)

    async def _ask(self, spec: ReplicaSpec) -> str:
        warm, log_path = self._home.warm_socket("serve"), Path(self._home.log_dir) / "settings-check.log"
        try:
            child = await Child.spawn(warm, ENTRY, {"spec": spec.to_json()}, log_path=log_path, name=spec.replica_id)
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
