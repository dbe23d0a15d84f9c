"""Copies between a device and pageable memory of the host through a ring of page-locked buffers.

A GPU copies from and to page-locked memory alone. For other memory the driver keeps a small buffer of its own, which
one thread fills while the link waits: 10 to 17 GB/s where page-locked copies make 55 (H200, DeepSpeed's pull request
8283).
A snapshot's mapping is too large to lock for one use. Here the link fills one buffer while threads empty the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from runtime.devices.kind import DeviceKind

BUFFERS = 8
THREADS = 3  # of the host, per rank; the ranks of a box share its memory's bandwidth

Copy = Callable[[torch.Tensor, torch.Tensor], None]


class StagingRing:
    """For one thread, in whose current stream the device copies; `elements` float32 a buffer. `copy`: (target, source),
    both on the host. Leave the context to wait for all copies; an error of one is raised there or before."""

    def __init__(self, kind: DeviceKind, elements: int, copy: Copy):
        self._kind, self._copy = kind, copy
        # Each with what must be over before it is used again.
        self._free: deque[tuple[torch.Tensor, Callable[[], Any]]] = deque(
            (kind.locked_buffer(elements), _nothing) for _ in range(BUFFERS)
        )
        self._filled: deque[tuple[Future[None], torch.Tensor, torch.Tensor, torch.Tensor]] = deque()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")

    def __enter__(self) -> StagingRing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._threads.shutdown()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy from the device (n,) into the host's memory (n,)."""
        buffer, over = self._free.popleft()
        over()
        part = buffer[: source.numel()]
        part.copy_(source, non_blocking=True)
        landing = self._threads.submit(self._land, self._kind.mark(), target, part)
        self._free.append((buffer, landing.result))

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy from the host's memory (n,) to the device (n,)."""
        while len(self._filled) > BUFFERS // 2:
            self._send()
        buffer, over = self._free.popleft()
        over()
        part = buffer[: source.numel()]
        self._filled.append((self._threads.submit(self._copy, part, source), buffer, part, target))

    def _land(self, arrived: Callable[[], None], target: torch.Tensor, part: torch.Tensor) -> None:
        arrived()
        self._copy(target, part)

    def _send(self) -> None:
        filling, buffer, part, target = self._filled.popleft()
        filling.result()
        target.copy_(part, non_blocking=True)
        self._free.append((buffer, self._kind.mark()))

    def _finish(self) -> None:
        while self._filled:
            self._send()
        for _, over in self._free:
            over()


def _nothing() -> None:
    return
