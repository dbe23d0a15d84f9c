"""The table of all kinds of devices. A machine uses the first kind that it has; the host, which every machine has, is
last."""

from __future__ import annotations

from typing import Any

from runtime.devices import cuda, nvml
from runtime.devices.kind import HOST_MEMORY, DeviceKind

HOST = DeviceKind()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (cuda.KIND, HOST)}

# What concerns every machine, whatever devices it has; see the functions.
FORK_ENVIRONMENT = cuda.FORK_ENVIRONMENT
"""Variables that keep libraries from touching devices while a process that will fork imports them."""
before_fork, at_fault, not_ready = nvml.close, cuda.at_fault, cuda.not_ready


def kind_of(name: str) -> DeviceKind:
    return KINDS[name]


def of_torch(device: Any) -> DeviceKind:
    """The kind of a tensor's or a worker's device."""
    return KINDS[device.type]


def in_host_memory(device: Any) -> bool:
    """Whether the CPU can read a tensor on that device directly."""
    return device.type == HOST_MEMORY


def present() -> DeviceKind:
    """The kind that this machine uses, found without touching a device."""
    return next(kind for kind in KINDS.values() if kind.present())
