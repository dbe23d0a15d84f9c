"""The table of kinds. The first that a machine has is its own; the host comes last, which every machine has."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from runtime.devices import cpu, cuda
from runtime.devices.kind import DeviceKind

HOST = cpu.KIND
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (cuda.KIND, HOST)}


class UnknownDeviceKind(ValueError):
    """A name that is no row of the table."""

    def __init__(self, name: str):
        super().__init__(f"device kind {name!r} is not known; expected one of {', '.join(KINDS)}")


class TorchDevice(Protocol):
    """Of torch.device, whose types are the names of kinds."""

    @property
    def type(self) -> str: ...


def kind_of(name: str) -> DeviceKind:
    """Raises UnknownDeviceKind."""
    try:
        return KINDS[name]
    except KeyError:
        raise UnknownDeviceKind(name) from None


def of_torch(device: TorchDevice) -> DeviceKind:
    """Of a tensor's or a worker's device. Raises UnknownDeviceKind."""
    return kind_of(device.type)


def in_host_memory(device: TorchDevice) -> bool:
    """Whether the processor reads a tensor there directly."""
    return device.type == cpu.HOST_MEMORY


def hardware_first() -> list[DeviceKind]:
    """All kinds, in the order in which a machine is asked for them."""
    return sorted(KINDS.values(), key=lambda kind: kind.on_host)


def present() -> DeviceKind:
    """The kind that this machine is to use, asked without touching a device."""
    return next(kind for kind in hardware_first() if kind.present())


def available() -> DeviceKind:
    """The kind that this process can compute on."""
    return next(kind for kind in hardware_first() if kind.available())


def fork_environment() -> dict[str, str]:
    """Of every kind: a library asks for the devices of each, whatever the machine has."""
    return {name: value for kind in KINDS.values() for name, value in kind.fork_environment().items()}


def copy_streams() -> ExitStack:
    """A stream of its own for the copies of this thread, on whatever the process computes on."""
    with ExitStack() as streams:
        for kind in KINDS.values():
            streams.enter_context(kind.copy_stream())
        return streams.pop_all()
