"""python -m serve.load.host_to_device: the rate at which page-locked memory reaches a GPU, as JSON.

The limit of every load of weights: PCIe (or NVLink-C2C), one copy engine. A process of its own, because a CUDA context
stays for the life of a process.
"""

from __future__ import annotations

import json
import sys

import torch

BUFFER_BYTES = 256 * 1024 * 1024
ROUNDS = 4


def bytes_per_s(device: int = 0) -> float:
    """Fastest of a few copies, by the GPU's own clock. Raises RuntimeError without a GPU or without room on it."""
    source = torch.ones(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    fastest_ms = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        fastest_ms = min(fastest_ms, begin.elapsed_time(end))
    return BUFFER_BYTES / (fastest_ms / 1e3)


if __name__ == "__main__":
    print(json.dumps({"host_to_device_bytes_per_s": bytes_per_s(int(sys.argv[1]) if len(sys.argv) > 1 else 0)}))
