"""The kinds of devices: the host's logical devices, and the table of all kinds.

A machine uses the first kind that it has; the host, which every machine has, is last. Logical devices are equal parts
of the host's processors and memory, for machines without accelerators.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from runtime.devices import cuda
from runtime.devices.kind import DeviceKind, Found, for_processors, installed

log = logging.getLogger(__name__)

DEFAULT_LOGICAL_DEVICES = 8
HOST_MEMORY = "cpu"
"""torch's and DeepSpeed's name for host memory, on machines of every kind."""
_CPUINFO = Path("/proc/cpuinfo")
# x86 names of the extensions, and the name in Arm's kernel.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
NEEDS_GPUS = (
    "this is the CUDA build, whose engines compute on NVIDIA GPUs alone, and the box has only logical CPU devices. If "
    "[box] devices is 'auto', the driver showed no GPU: start a container with `--gpus all`; on bare metal "
    "`nvidia-smi` has to list them, and the files /dev/nvidia* have to be there, which nvidia-persistenced makes, or "
    "`sudo nvidia-modprobe -u -c=0`. For logical CPU devices install the CPU build (`APPLIANCE_BUILD=cpu make setup "
    "VENV=.venv-cpu`)"
)
# Engines import what vLLM imports of transformers, and that imports torchvision wherever it is installed.
OF_ANOTHER_TORCH = (
    "torchvision {torchvision} is for GPUs and torch {torch} is not: whatever imports the first fails, and engines do. "
    "vLLM asks pip for it; the box needs none (`pip uninstall torchvision torchaudio torchcodec`)"
)


class Cpu(DeviceKind):
    name = torch_type = accelerator = HOST_MEMORY
    title = "logical CPU device"
    on_host = True
    collectives = "gloo"
    locks_pages = False
    head_sizes = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})  # vLLM 0.32's CPUAttentionBackend

    def present(self) -> bool:
        return True

    def probe(self) -> tuple[Found, ...]:
        return self.parts(DEFAULT_LOGICAL_DEVICES)

    def parts(self, count: int) -> tuple[Found, ...]:
        """The host as `count` devices."""
        each_bytes = host_memory_bytes() // count
        return tuple(Found(index, self.title, each_bytes) for index in range(count))

    def address(self, index: int) -> str:
        return self.name  # devices of the CPU are interchangeable

    def before_computing(self) -> None:
        """Ask for AMX tiles. The kernel ends a process that uses them without that by SIGILL; the answer is inherited
        by what the process forks."""
        if "amx_tile" in host_features():
            import torch

            if not torch.cpu._init_amx():
                log.warning("the kernel refuses AMX tiles: what computes with them ends by SIGILL")

    def computes_bf16(self) -> bool:
        return bool(_BF16_FLAGS & host_features())

    def lacks_for_quantised(self) -> str:
        # vLLM's library for x86 processors without AVX-512 has no kernel for four bits, and its int8 layers gave
        # log-probabilities that were 2.3 nats off. Every such processor has SSE2, and no other has.
        return "AVX-512" if "sse2" in host_features() and "avx512f" not in host_features() else ""

    def of_another_build(self) -> str:
        if for_processors() is False:
            return NEEDS_GPUS
        torch, torchvision = installed("torch"), installed("torchvision")
        if not torch.endswith("+cpu") or not torchvision or "+" in torchvision:
            return ""
        return OF_ANOTHER_TORCH.format(torch=torch, torchvision=torchvision)


HOST = Cpu()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (cuda.KIND, HOST)}


class UnknownDeviceKind(ValueError):
    """The name is not in the table."""


def kind_of(name: str) -> DeviceKind:
    """Raises UnknownDeviceKind."""
    if name not in KINDS:
        raise UnknownDeviceKind(f"device kind {name!r} is not known; expected one of {', '.join(KINDS)}")
    return KINDS[name]


def of_torch(device: Any) -> DeviceKind:
    """The kind of a tensor's or a worker's device."""
    return next(kind for kind in KINDS.values() if kind.torch_type == device.type)


def in_host_memory(device: Any) -> bool:
    """Whether the CPU can read a tensor on that device directly."""
    return device.type == HOST_MEMORY


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


def host_memory_bytes() -> int:
    """Total memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def host_features() -> frozenset[str]:
    """The processor's extensions as the kernel names them, such as avx2 and amx_tile; empty if it names none."""
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    lists = [flags.split() for name, _, flags in lines if name.strip() in ("flags", "Features")]  # x86, Arm
    return frozenset().union(*lists)
