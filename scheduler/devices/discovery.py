"""Discovers the devices of this node: accelerators if there are any, else logical CPU devices."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.devices import kinds
from runtime.devices.kind import DeviceKind, Found
from scheduler.core.inventory import Device

HEAD_NODE = "n0"


def discover_devices(setting: str | int = "auto", node: str = HEAD_NODE) -> tuple[Device, ...]:
    """Devices of this node, by index.

    `setting`: "auto" takes every device of the first kind present (runtime.devices.kinds), which is 8 logical CPU
    devices on a machine with nothing else; a number creates that many logical CPU devices, so that a machine without
    GPUs runs the same code.
    """
    if setting != "auto":
        return logical_devices(int(setting), node)
    for kind in kinds.hardware_first():
        if devices := _devices(kind, kind.probe(), node):
            return devices
    return ()


def logical_devices(count: int, node: str = HEAD_NODE) -> tuple[Device, ...]:
    """`count` CPU devices that share the host's cores and memory in equal parts."""
    return _devices(kinds.HOST, kinds.HOST.parts(count), node)


def _devices(kind: DeviceKind, found: Iterable[Found], node: str) -> tuple[Device, ...]:
    return tuple(
        Device(
            id=f"{node}/{one.index}",
            node=node,
            index=one.index,
            kind=kind.name,
            name=one.name,
            memory_bytes=one.memory_bytes,
            numa_node=one.numa_node,
            nvlink_peers=frozenset(f"{node}/{other}" for other in one.linked),
        )
        for one in found
    )
