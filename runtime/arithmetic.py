"""In which precision a device computes at full speed, known without importing torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# x86 by name of the extension, Arm as its kernel calls it.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@cache
def computes_bf16(device_kind: str) -> bool:
    """Whether devices of this kind ("cuda", "cpu") multiply matrices in bfloat16 natively.

    Elsewhere it is emulated: on a processor with AVX2 alone, matrix products took ten times as long as in float32.
    """
    return device_kind != "cpu" or bf16_in(CPUINFO.read_text())


def bf16_in(cpuinfo: str) -> bool:
    """The same of a processor by the text of its /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(_BF16_FLAGS & set(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features"))
