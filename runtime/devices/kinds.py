"""Lists the kinds of devices. A machine uses the first kind that it has; the host, which every machine has, is last."""

from __future__ import annotations

from typing import Any

from runtime.devices import cpu, cuda
from runtime.devices.kind import DeviceKind

HOST = cpu.KIND
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (cuda.KIND, HOST)}


class UnknownDeviceKind(ValueError):
    """The name is not in the table."""

    def __init__(self, name: str):
        super().__init__(f"device kind {name!r} is not known; expected one of {', '.join(KINDS)}")


def kind_of(name: str) -> DeviceKind:
    """Raises UnknownDeviceKind."""
    try:
        return KINDS[name]
    except KeyError:
        raise UnknownDeviceKind(name) from None


def of_torch(device: Any) -> DeviceKind:
    """Return the kind of a tensor's or a worker's device. Raises UnknownDeviceKind."""
    for kind in KINDS.values():
        if kind.torch_type == device.type:
            return kind
    raise UnknownDeviceKind(device.type)


def in_host_memory(device: Any) -> bool:
    """Whether the CPU can read a tensor on that device directly."""
    return device.type == cpu.HOST_MEMORY


def present() -> DeviceKind:
    """The kind that this machine uses, found without touching a device."""
    return next(kind for kind in KINDS.values() if kind.present())


def fork_environment() -> dict[str, str]:
    """Those of every kind, because a library looks for devices of each kind, whatever the machine has."""
    return {name: value for kind in KINDS.values() for name, value in kind.fork_environment().items()}


def is_of_a_device(error: str, message: str) -> bool:
    """See DeviceKind.at_fault; asks every kind."""
    return any(kind.at_fault(error, message) for kind in KINDS.values())


def not_ready(message: str) -> str:
    """See DeviceKind; asks the kind that knows the message."""
    return next(filter(None, (kind.not_ready(message) for kind in KINDS.values())), "")
