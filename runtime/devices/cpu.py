"""Defines logical CPU devices: equal parts of the host's processors and memory, for machines without accelerators."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from runtime.devices.kind import DeviceKind, Found

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
        return self.name  # all equal: a parked rank can resume in the place of any

    def computes_bf16(self) -> bool:
        return _host_computes_bf16()

    def engine_arguments(self) -> list[str]:
        return []

    def available(self) -> bool:
        return True


KIND = Cpu()


def host_memory_bytes() -> int:
    """Total memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def _host_computes_bf16() -> bool:
    return bf16_in(_CPUINFO.read_text())


def bf16_in(cpuinfo: str) -> bool:
    """Whether a processor multiplies in bfloat16 natively, by the text of its /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(_BF16_FLAGS & set(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features"))
