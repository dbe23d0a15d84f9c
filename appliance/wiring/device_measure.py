"""Measures devices of every node of the box: those of this machine here, others by the agent of their node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.ports import DEVICE_FAILED
from scheduler.devices.measure import DeviceProcesses, NotMeasured
from scheduler.ray.node import NodeConfig
from scheduler.ray.nodes import Nodes


class NodeMeasures:
    """Implements `appliance.controller.interfaces.ports.DeviceMeasure`."""

    def __init__(self, nodes: Nodes, home: NodeConfig):
        self._nodes, self._home = nodes, home.name
        self._here = DeviceProcesses(home.devices, numa_bind=home.numa_bind, folder=Path(home.run_dir))

    async def alone(self, device_id: str) -> tuple[dict[str, float], list[str]]:
        node = device_id.partition("/")[0]
        with _failures():
            if node == self._home:
                return await self._here.alone(device_id)
            return await self._nodes.measured_alone(node, device_id)

    async def together(self, device_ids: list[str]) -> dict[str, float]:
        (node,) = {device_id.partition("/")[0] for device_id in device_ids}
        with _failures():
            if node == self._home:
                return await self._here.together(device_ids)
            return await self._nodes.measured_together(node, device_ids)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NotMeasured as error:
        raise OperationFailed(str(error), code=DEVICE_FAILED if error.by_device else "not_measured") from error
