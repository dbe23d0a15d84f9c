"""Copies a rank's memory into and out of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from runtime.devices.kinds import in_host_memory, of_torch
from runtime.libc import libc
from train.state.staging import StagingRing
from weights.format.slices import Strided
from weights.format.torch_views import as_tensor, runs_view

FLOAT_BYTES = 4
_PART_ELEMENTS = 2**20  # of a staging ring's buffer
Piece = tuple[str, Strided, torch.Tensor]
"""A tensor of the snapshot, which of its elements, and this rank's memory for them: (n,) float32, contiguous."""


def write(draft: Any, pieces: Iterable[Piece]) -> None:
    _copy_all(draft, pieces, out=True)


def read(lease: Any, pieces: Iterable[Piece]) -> None:
    _copy_all(lease, pieces, out=False)


def _copy_all(handle: Any, pieces: Iterable[Piece], *, out: bool) -> None:
    rings: dict[torch.device, StagingRing] = {}
    with ExitStack() as opened:
        for name, runs, ours in pieces:
            assert ours.dtype == torch.float32 and ours.is_contiguous() and ours.numel() == runs.size
            device, copy = ours.device, _copy
            if not in_host_memory(device) and runs.count == 1:  # a device gathers columns by itself
                if device not in rings:
                    rings[device] = opened.enter_context(StagingRing(of_torch(device), _PART_ELEMENTS, _copy))
                copy = rings[device].to_host if out else rings[device].to_device
            view = handle.view(name)
            for mine, theirs in _parts(ours, runs, as_tensor(view, "F32", (view.nbytes // FLOAT_BYTES,))):
                copy(*((theirs, mine) if out else (mine, theirs)))


def _parts(ours: torch.Tensor, runs: Strided, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if runs.count > 1:
        yield ours.view(runs.count, runs.run), runs_view(whole, runs)
        return
    for first in range(0, runs.size, _PART_ELEMENTS):
        last = min(first + _PART_ELEMENTS, runs.size)
        yield ours[first:last], whole[runs.start + first : runs.start + last]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if not all(in_host_memory(tensor.device) and tensor.is_contiguous() for tensor in (target, source)):
        target.copy_(source)
        return
    # glibc writes long runs past the cache (runtime.processes.warm_parents.WARM_ENV), which torch's own copy never
    # does: half the time.
    libc.memmove(target.data_ptr(), source.data_ptr(), FLOAT_BYTES * source.numel())
