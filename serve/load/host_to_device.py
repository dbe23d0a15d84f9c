"""python -m serve.load.host_to_device KIND: the rate at which page-locked memory reaches a device, as JSON.

The limit of every load of weights: PCIe (or NVLink-C2C), one copy engine. A process of its own, because a CUDA context
stays for the life of a process.
"""

from __future__ import annotations

import json
import sys

from runtime.devices import kinds

BUFFER_BYTES = 256 * 1024 * 1024
ROUNDS = 4


def bytes_per_s(kind: str | None = None, device: int = 0) -> float | None:
    """Fastest of a few copies, by the device's own clock; `kind` None: the one that this process can compute on. None
    without a link. Raises RuntimeError without a device or without room on it."""
    there = kinds.available() if kind is None else kinds.kind_of(kind)
    seconds = there.copy_seconds(device, BUFFER_BYTES, ROUNDS)
    return None if seconds is None else BUFFER_BYTES / seconds


if __name__ == "__main__":
    print(json.dumps({"host_to_device_bytes_per_s": bytes_per_s(*sys.argv[1:2])}))
