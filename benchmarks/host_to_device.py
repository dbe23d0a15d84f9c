"""Measures the copy rate from page-locked memory to a device (PCIe or NVLink-C2C, one copy engine), which limits every
load of weights."""

from __future__ import annotations

from runtime.devices import kinds

BUFFER_BYTES = 256 * 1024 * 1024
ROUNDS = 4


def bytes_per_s(kind: str | None = None, device: int = 0) -> float | None:
    """Return the rate of the fastest of a few copies, by the device's own clock; None without a link. `kind` None: the
    one this process can compute on. Raises RuntimeError without a device or without free memory on it."""
    there = kinds.available() if kind is None else kinds.kind_of(kind)
    seconds = there.copy_seconds(device, BUFFER_BYTES, ROUNDS)
    return None if seconds is None else BUFFER_BYTES / seconds
