"""Copies a rank's memory into and out of the files of a snapshot or a version, cast to the dtype of the target.

By system calls where elements are in one run: a new process that maps shared memory takes a page fault for every
4 KiB, which costs twice the copy itself. Columns of a matrix go through a mapping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from runtime.devices.kinds import in_host_memory, of_torch
from train.state.staging import StagingRing
from weights.format.layout import Placed
from weights.format.torch_views import Strided, as_tensor, runs_view, torch_dtype

_PART_BYTES = 4 << 20  # a staging ring's buffer
Piece = tuple[str, Strided, torch.Tensor]
"""A stored tensor, which of its elements, and this rank's memory for them: (n,), contiguous."""


def write(draft: Any, pieces: Iterable[Piece]) -> None:
    with _Files(draft, os.O_WRONLY) as files:
        for name, runs, ours in pieces:
            placed, dtype = files.placed(name)
            if runs.count > 1:
                files.columns(placed, runs).copy_(ours.to(dtype).view(runs.count, runs.run))
                continue
            for at, part in _parts(runs, ours, dtype):
                put = partial(_repeat, os.pwrite, files.fd(placed.file), placed.start + at * dtype.itemsize)
                if in_host_memory(part.device):
                    put(part.to(dtype))
                else:
                    files.ring(part.device).to_host(part.to(dtype), put)


def read(lease: Any, pieces: Iterable[Piece]) -> None:
    with _Files(lease, os.O_RDONLY) as files:
        for name, runs, ours in pieces:
            placed, dtype = files.placed(name)
            if runs.count > 1:
                ours.view(runs.count, runs.run).copy_(files.columns(placed, runs))
                continue
            for at, part in _parts(runs, ours, dtype):
                get = partial(_repeat, _pread, files.fd(placed.file), placed.start + at * dtype.itemsize)
                if not in_host_memory(part.device):
                    files.ring(part.device).to_device(part, get, dtype)
                elif part.dtype == dtype:
                    get(part)
                else:
                    get(buffer := torch.empty_like(part, dtype=dtype))
                    part.copy_(buffer)


class _Files:
    """The open files of a draft or a lease, and a staging ring for each device."""

    def __init__(self, handle: Any, flags: int):
        self._handle, self._flags, self._copying = handle, flags, ExitStack()
        self._fds: dict[str, int] = {}
        self._rings: dict[torch.device, StagingRing] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._copying.__exit__(*error)
        finally:  # a ring's threads use the files until its end
            for fd in self._fds.values():
                os.close(fd)

    def placed(self, name: str) -> tuple[Placed, torch.dtype]:
        placed = self._handle.layout.find(name)
        return placed, torch_dtype(placed.spec.dtype)

    def columns(self, placed: Placed, runs: Strided) -> torch.Tensor:
        spec = placed.spec
        return runs_view(as_tensor(self._handle.view(spec.name), spec.dtype, (spec.numel,)), runs)

    def fd(self, file: str) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(self._handle.path / file, self._flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._fds[file]

    def ring(self, device: torch.device) -> StagingRing:
        if device not in self._rings:
            self._rings[device] = self._copying.enter_context(StagingRing(of_torch(device), _PART_BYTES // 4))
        return self._rings[device]


def _parts(runs: Strided, ours: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of `ours`, each with its first element's number in the stored tensor."""
    most = _PART_BYTES // dtype.itemsize
    for first in range(0, runs.run, most):
        yield runs.start + first, ours[first : first + most]


def _pread(fd: int, into: memoryview, at: int) -> int:
    return os.preadv(fd, [into], at)


def _repeat(call: Callable[[int, memoryview, int], int], fd: int, at: int, memory: torch.Tensor) -> None:
    """Repeat `call` until it has copied all of `memory`, which is on the host."""
    rest = memoryview(memory.detach().view(torch.uint8).numpy())
    while rest:
        count = call(fd, rest, at)
        if count == 0:
            raise EOFError(f"a file ends at byte {at} of a tensor")
        rest, at = rest[count:], at + count
