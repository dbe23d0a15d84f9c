"""Where the effects do their work: devices, directories and warm parents of the box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.node import NodeAgent, WarmSpec
from scheduler.inventory import Device
from scheduler.ray_actors import ask, named_actor

WARM_TIMEOUT_S = 180.0


class RayBox:
    """This node: its devices and directories, and the agent that keeps its warm parents. Ray must be initialised."""

    def __init__(
        self, devices: tuple[Device, ...], run_dir: Path, log_dir: Path, shm_root: Path, warm: tuple[WarmSpec, ...]
    ):
        self.devices, self.run_dir, self.log_dir, self.shm_root, self.warm = devices, run_dir, log_dir, shm_root, warm
        self._devices = {device.id: device for device in devices}
        self._agent: Any = None

    async def connect(self) -> None:
        """Start or find the node agent and its warm parents. Returns at once; `wait_warm` waits for one."""
        self._agent = named_actor(NodeAgent, "node:n0", [spec for spec in self.warm])
        await self._agent.start.remote()

    async def wait_warm(self, name: str, verb: str, target: str) -> None:
        """Returns when the warm parent takes requests; raises EffectFailed, said of this verb and target."""
        await ask(verb, target, self._agent.wait_warm.remote(name, WARM_TIMEOUT_S))

    def device(self, device_id: str) -> Device:
        return self._devices[device_id]

    def socket_path(self, replica_id: str) -> str:
        return str(self.run_dir / "r" / f"{replica_id}.sock")

    def warm_socket(self, name: str) -> str:
        return next(spec.socket_path for spec in self.warm if spec.name == name)
