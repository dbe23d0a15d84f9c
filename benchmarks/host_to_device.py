"""Measures the copy rate from page-locked memory to a GPU (PCIe or NVLink-C2C, one copy engine), which limits every
load of weights."""

from __future__ import annotations

import torch

BUFFER_BYTES = 256 * 1024 * 1024
ROUNDS = 4


def bytes_per_s(device: int = 0) -> float | None:
    """Return the rate of the fastest of a few copies, by the GPU's own clock; None without one."""
    if not torch.cuda.is_available():
        return None
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
    return BUFFER_BYTES / fastest_ms * 1e3
