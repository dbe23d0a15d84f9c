"""The table of device kinds, and the table of accelerators' published figures by driver name.

A machine uses the first kind that it has; the host, which every machine has, is last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.devices import cuda, nvml
from runtime.devices.kind import HOST_MEMORY, DeviceKind

HOST = DeviceKind()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (cuda.KIND, HOST)}

# For every machine, whatever devices it has.
FORK_ENVIRONMENT = cuda.FORK_ENVIRONMENT
"""Variables that keep libraries from touching devices while a process that will fork imports them."""
before_fork, at_fault, not_ready = nvml.close, cuda.at_fault, cuda.not_ready


def kind_of(name: str) -> DeviceKind:
    return KINDS[name]


def of_torch(device: Any) -> DeviceKind:
    """The kind of a torch device."""
    return KINDS[device.type]


def in_host_memory(device: Any) -> bool:
    """Whether the CPU can read a tensor on that device directly."""
    return device.type == HOST_MEMORY


def present() -> DeviceKind:
    """The kind that this machine uses, found without touching a device."""
    return next(kind for kind in KINDS.values() if kind.present())


class Accelerator(NamedTuple):
    """peak_flops: FLOP/s of dense bfloat16 products accumulated in float32. memory_rate, link_rate, host_rate: bytes
    per second of its memory, of collectives within one machine, and of copies from the host. board_w: watts.
    product_share: of `peak_flops` that large matrix products reach within the power limit."""

    peak_flops: float
    memory_rate: float
    link_rate: float
    host_rate: float
    board_w: int
    product_share: float


# Figures of the fastest form factor (SXM). A key is words of a driver's name, in any order, joined by dashes.
# link_rate: NCCL bus bandwidth over NVLink (minima of Azure's node checks, reduce-scatter without NVLS); PCIe 4 with
# peers: 20 GB/s; GeForce: less, every byte passes the host twice. host_rate: pinned copies, 55 GB/s on PCIe 5, 25 on 4.
ACCELERATORS = {
    "a10": Accelerator(125e12, 0.6e12, 20e9, 25e9, 150, 0.8),
    "a100": Accelerator(312e12, 2.0e12, 230e9, 25e9, 400, 0.78),
    "a800": Accelerator(312e12, 2.0e12, 160e9, 25e9, 400, 0.78),
    "b200": Accelerator(2250e12, 8.0e12, 700e9, 55e9, 1000, 0.6),
    "h20": Accelerator(148e12, 4.0e12, 360e9, 55e9, 400, 0.85),
    "h100": Accelerator(989e12, 3.35e12, 360e9, 55e9, 700, 0.62),
    "h800": Accelerator(989e12, 3.35e12, 160e9, 55e9, 700, 0.62),
    "h200": Accelerator(989e12, 4.8e12, 360e9, 55e9, 700, 0.62),
    "l20": Accelerator(119.5e12, 0.86e12, 20e9, 25e9, 275, 0.85),
    "l4": Accelerator(121e12, 0.3e12, 20e9, 25e9, 72, 0.5),
    "l40s": Accelerator(362e12, 0.86e12, 20e9, 25e9, 350, 0.6),
    "rtx-3090": Accelerator(71e12, 0.94e12, 10e9, 25e9, 350, 0.9),
    "rtx-4090": Accelerator(165.2e12, 1.0e12, 10e9, 25e9, 450, 0.9),
    "rtx-5090": Accelerator(209.5e12, 1.79e12, 20e9, 55e9, 575, 0.9),
    "rtx-6000-ada": Accelerator(364e12, 0.96e12, 20e9, 25e9, 300, 0.55),
    "rtx-a6000": Accelerator(154.8e12, 0.768e12, 20e9, 25e9, 300, 0.75),
}
_OTHER_FORMS = frozenset(("d", "laptop", "max", "mig", "nvl", "pcie"))


def accelerator(name: str) -> Accelerator | None:
    """name: as the driver reports it ("NVIDIA A100-SXM4-80GB"). None for a model that the table does not have."""
    words = frozenset(name.lower().replace("-", " ").split())
    if words & _OTHER_FORMS:
        return None
    return next((row for key, row in ACCELERATORS.items() if words.issuperset(key.split("-"))), None)
