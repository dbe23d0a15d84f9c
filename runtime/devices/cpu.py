"""Defines logical CPU devices: equal parts of the host's processors and memory, for machines without accelerators."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from runtime.devices.builds import NEEDS_GPUS, for_processors, of_another_torch
from runtime.devices.kind import DeviceKind, Found

log = logging.getLogger(__name__)

DEFAULT_LOGICAL_DEVICES = 8
HOST_MEMORY = "cpu"
"""torch's and DeepSpeed's name for host memory, on machines of every kind."""
_CPUINFO = Path("/proc/cpuinfo")
# x86 names of the extensions, and the name in Arm's kernel.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


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

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        return {}

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
        return NEEDS_GPUS if for_processors() is False else of_another_torch()

    def engine_arguments(self) -> list[str]:
        return []


KIND = Cpu()


def host_memory_bytes() -> int:
    """Total memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def host_features() -> frozenset[str]:
    """The processor's extensions as the kernel names them, such as avx2 and amx_tile; empty if it names none."""
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    lists = [flags.split() for name, _, flags in lines if name.strip() in ("flags", "Features")]  # x86, Arm
    return frozenset().union(*lists)
