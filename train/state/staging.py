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

HostCopy = Callable[[torch.Tensor], None]
"""Takes the elements of a buffer, or fills them."""


class StagingRing:
    """For one thread, in whose current stream the device copies; `elements` float32 a buffer. Leave the context to wait
    for all copies; an error of one is raised there or before."""

    def __init__(self, kind: DeviceKind, elements: int):
        self._kind = kind
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

    def to_host(self, source: torch.Tensor, take: HostCopy) -> None:
        """Begin a copy from the device (n,), whose elements `take` gets."""
        buffer, over = self._free.popleft()
        over()
        part = buffer.view(source.dtype)[: source.numel()]
        part.copy_(source, non_blocking=True)
        landing = self._threads.submit(self._land, self._kind.mark(), take, part)
        self._free.append((buffer, landing.result))

    def to_device(self, target: torch.Tensor, fill: HostCopy, dtype: torch.dtype) -> None:
        """Begin a copy to the device (n,) of elements that `fill` provides in `dtype`."""
        while len(self._filled) > BUFFERS // 2:
            self._send()
        buffer, over = self._free.popleft()
        over()
        part = buffer.view(dtype)[: target.numel()]
        self._filled.append((self._threads.submit(fill, part), buffer, part, target))

    def _land(self, arrived: Callable[[], None], take: HostCopy, part: torch.Tensor) -> None:
        arrived()
        take(part)

    def _send(self) -> None:
        filling, buffer, part, target = self._filled.popleft()
        filling.result()
        # Cast on the device: torch would cast on the host, by way of a buffer that is not page-locked.
        target.copy_(
            part if part.dtype == target.dtype else part.to(target.device, non_blocking=True), non_blocking=True
        )
        self._free.append((buffer, self._kind.mark()))

    def _finish(self) -> None:
        while self._filled:
            self._send()
        for _, over in self._free:
            over()


def _nothing() -> None:
    return
