"""Discovers the devices of this node: accelerators if there are any, else logical CPU devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from runtime.devices import kinds
from runtime.devices.kind import DeviceKind, DevicesRefused, Found
from scheduler.core.workload import Device

HOME_NODE = "n0"


def discover_devices(setting: str | int = "auto", node: str = HOME_NODE) -> tuple[Device, ...]:
    """Devices of this node, by index.

    `setting`: "auto" takes every device of the first kind present (runtime.devices.kinds), which is 8 logical CPU
    devices on a machine with nothing else; a number creates that many logical CPU devices, so that a machine without
    GPUs runs the same code. Raises DevicesRefused if this box cannot use the devices. Never falls back to the CPU by
    itself: users would notice only the low speed.
    """
    if setting != "auto":
        return logical_devices(int(setting), node)
    for kind in kinds.KINDS.values():
        if found := kind.probe():
            return _devices(kind, found, node)
    return ()


def check_build(devices: tuple[Device, ...]) -> None:
    """Raise DevicesRefused if the engines of this installation cannot compute on devices of this kind. Without this
    check, a box whose GPUs were missing or hidden from its container came up on logical CPU devices."""
    if why := kinds.kind_of(devices[0].kind).of_another_build():
        raise DevicesRefused(f"{why}.")


def foreign_use(devices: tuple[Device, ...]) -> list[str]:
    """Return a sentence for each device that other programs already use. Call it before the box starts any process."""
    users = kinds.kind_of(devices[0].kind).foreign()
    return [f"{device.id} ({device.name}) {users[device.index]}" for device in devices if device.index in users]


def logical_devices(count: int, node: str = HOME_NODE) -> tuple[Device, ...]:
    """Return `count` CPU devices, each with an equal part of the host's cores and memory."""
    return _devices(kinds.HOST, kinds.HOST.parts(count), node)


def _devices(kind: DeviceKind, probed: Iterable[Found], node: str) -> tuple[Device, ...]:
    return tuple(
        Device(
            **asdict(device) | {"linked": frozenset(f"{node}/{other}" for other in device.linked)},
            id=f"{node}/{device.index}",
            node=node,
            kind=kind.name,
        )
        for device in probed
    )
