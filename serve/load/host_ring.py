"""Copies host memory that a device cannot read at full rate, through page-locked buffers and with several threads.

Columns of a row-parallel matrix, tensors of another dtype and unlocked pages are first packed into a buffer.
Each thread has one buffer and one stream: while the device reads one thread's buffer, the others pack theirs. For a
single read, as in a wake, locking the pages instead would take longer than it saves.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import local

import torch

from runtime.devices.kinds import of_torch

BUFFER_BYTES = 16 * 2**20


class HostRing:
    """Context manager that on exit waits for all copies and re-raises their first error.

    threads: number of packing threads; each has a page-locked buffer of `buffer_bytes`.
    """

    def __init__(self, device: torch.device, threads: int = 1, buffer_bytes: int = BUFFER_BYTES):
        self._device, self._kind = device, of_torch(device)
        self._buffer_bytes = buffer_bytes
        self._inference = torch.is_inference_mode_enabled()  # inherited by packing threads
        self._mine = local()
        self._pending: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(threads, "pack", initializer=self._begin)

    def copy(self, target: torch.Tensor, stored: torch.Tensor) -> None:
        """Queue a copy of `stored` into `target`, which has the same shape; converts to the dtype of `target`."""
        if not target.dim():
            target, stored = target.view(1), stored.view(1)
        rows = self._buffer_bytes // target[:1].nbytes if target.numel() else 0
        if rows:
            for into, origin in zip(target.split(rows), stored.split(rows), strict=True):
                self._pending.append(self._pool.submit(self._copy, into, origin))
        else:  # a single row exceeds the buffer
            for into, origin in zip(target, stored, strict=True):
                self.copy(into, origin)

    def __enter__(self) -> HostRing:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
        for pending in self._pending:
            pending.result()

    def _begin(self) -> None:
        self._kind.use(self._device)  # new threads default to the first device
        self._mine.buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._kind.locks_pages)

    def _copy(self, target: torch.Tensor, stored: torch.Tensor) -> None:
        with torch.inference_mode(self._inference), torch.no_grad(), self._kind.copy_stream():
            packed = self._mine.buffer[: target.nbytes].view(target.dtype).view(target.shape)
            packed.copy_(stored)
            target.copy_(packed, non_blocking=True)
            self._kind.wait_for_copies(self._device)
