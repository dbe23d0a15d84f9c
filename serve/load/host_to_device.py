"""Measures the copy rate from page-locked memory to a device: `python -m serve.load.host_to_device KIND` prints JSON.

This rate (PCIe or NVLink-C2C, one copy engine) limits every load of weights. It runs in its own process, because a CUDA
context lasts as long as its process.
"""

from __future__ import annotations

import json
import sys

from runtime.devices import kinds

BUFFER_BYTES = 256 * 1024 * 1024
ROUNDS = 4


def bytes_per_s(kind: str | None = None, device: int = 0) -> float | None:
    """Return the rate of the fastest of a few copies, by the device's own clock; None without a link. `kind` None: the
    one this process can compute on. Raises RuntimeError without a device or without free memory on it."""
    there = kinds.available() if kind is None else kinds.kind_of(kind)
    seconds = there.copy_seconds(device, BUFFER_BYTES, ROUNDS)
    return None if seconds is None else BUFFER_BYTES / seconds


if __name__ == "__main__":
    print(json.dumps({"host_to_device_bytes_per_s": bytes_per_s(*sys.argv[1:2])}))
