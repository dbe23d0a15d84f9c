"""Measures what a rank computes by itself in a step: its forward passes, before it waits for other ranks.

All ranks end a step together, so the step's time says nothing of one of them. In a backward pass they wait for each
other's gradients; in a forward pass only for the ranks that share its weights (tensor parallelism, ZeRO-3).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ForwardTime:
    """device: where the rank computes; None: on the host itself. A device is asked by events in its own queue, which
    hold nothing up."""

    def __init__(self, device: torch.device | None):
        self._device = device
        self._events: list[torch.Event] = []  # two for each pass, used again in each step
        self._passes, self._host_s = 0, 0.0

    def begin_step(self) -> None:
        """Forget the passes of the step before, or of this one where it was left."""
        self._passes, self._host_s = 0, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a forward pass."""
        began_s = time.perf_counter()
        if self._device is not None:
            if len(self._events) == 2 * self._passes:
                self._events += [torch.Event(self._device, enable_timing=True) for _ in range(2)]
            self._events[2 * self._passes].record()
        yield
        if self._device is not None:
            self._events[2 * self._passes + 1].record()
        self._passes += 1
        self._host_s += time.perf_counter() - began_s

    def seconds(self) -> float:
        """The seconds of the step's passes so far. On a device it waits for the end of the last one."""
        if self._device is None or not self._passes:
            return self._host_s
        used = self._events[: 2 * self._passes]
        used[-1].synchronize()
        return sum(used[at].elapsed_time(used[at + 1]) for at in range(0, len(used), 2)) / 1000
