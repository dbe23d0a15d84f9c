"""Available memory of a machine, as the box reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of the machine, or of the enclosing control group with the least memory left (`where`). In bytes;
    `stalled`: PSI's "full avg10", percent, 0 where the kernel does not report it."""

    total: int
    available: int
    stalled: float = 0.0
    where: str = "this machine"
    swap_used: int = 0
