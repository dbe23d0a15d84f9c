"""Which devices this node has: NVIDIA GPUs through NVML, else logical CPU devices."""

from __future__ import annotations

import os
from pathlib import Path

import pynvml

from scheduler.core.inventory import Device

DEFAULT_LOGICAL_DEVICES = 8
HEAD_NODE = "n0"


def discover_devices(setting: str | int = "auto", node: str = HEAD_NODE) -> tuple[Device, ...]:
    """Devices of this node, by index.

    `setting`: "auto" takes every NVIDIA GPU, or 8 logical CPU devices where there is none; a number asks for that
    many logical CPU devices, so that a machine without GPUs runs the same code. NUMA node and NVLink peers are read
    where the driver tells them (NVML API reference, nvmlDeviceGetP2PStatus).
    """
    if setting == "auto":
        return nvidia_devices(node) or logical_devices(DEFAULT_LOGICAL_DEVICES, node)
    return logical_devices(int(setting), node)


def logical_devices(count: int, node: str = HEAD_NODE) -> tuple[Device, ...]:
    """`count` CPU devices that share the host's cores and memory in equal parts."""
    each_bytes = host_memory_bytes() // count
    return tuple(
        Device(id=f"{node}/{index}", node=node, index=index, kind="cpu", name="logical CPU device",
               memory_bytes=each_bytes)
        for index in range(count)
    )  # fmt: skip


def host_memory_bytes() -> int:
    """All the memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def nvidia_devices(node: str = HEAD_NODE) -> tuple[Device, ...]:
    """Every NVIDIA GPU the driver shows, none when there is no driver."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission):
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_nvidia_device(node, index, handles) for index in range(len(handles)))
    finally:
        pynvml.nvmlShutdown()


def _nvidia_device(node: str, index: int, handles: list) -> Device:
    handle = handles[index]
    others = [other for other in range(len(handles)) if other != index]
    return Device(
        id=f"{node}/{index}",
        node=node,
        index=index,
        kind="cuda",
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        numa_node=_numa_node(_bus_id(pynvml.nvmlDeviceGetPciInfo(handle))),
        nvlink_peers=frozenset(f"{node}/{other}" for other in others if _linked(handle, handles[other])),
    )


def _bus_id(pci) -> str:
    raw = pci.busId if isinstance(pci.busId, str) else pci.busId.decode()
    return raw.lower()[-12:]  # NVML writes the domain with 8 digits, sysfs with 4


def _numa_node(bus: str) -> int | None:
    try:
        number = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return number if number >= 0 else None


def _linked(handle, other) -> bool:
    """Whether NVLink joins two GPUs, directly or through an NVSwitch. (A link's own far end is then the switch, so that
    its address names no GPU.)"""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return status == pynvml.NVML_P2P_STATUS_OK
