"""Plans a rank's copies into and out of a snapshot, once per world, as few long runs.

ZeRO 1 and 2 keep a rank's parameters end to end, and a snapshot's layout has them in the same order, so what is a
hundred fragments of each part is one run. Under ZeRO-3 a run is a fragment; columns under tensor parallelism are
strided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from runtime.devices.kinds import in_host_memory, of_torch
from runtime.libc import libc
from train.state.staging import StagingRing
from weights.format.layout import Layout
from weights.format.slices import Strided
from weights.format.torch_views import as_tensor, runs_view

FLOAT_BYTES = 4
_PIECE_ELEMENTS = 2**20  # of a staging ring's buffer


@dataclass(frozen=True)
class Move:
    """`ours` (n,) float32, memory of this rank, and the elements `runs`, n in all, of `file` as if all of it were
    float32."""

    ours: torch.Tensor
    file: str
    runs: Strided


@dataclass(frozen=True)
class CopyPlan:
    """All moves of a rank. It is good for as long as the tensors it was made of."""

    moves: tuple[Move, ...]

    @classmethod
    def of(cls, layout: Layout, pieces: Iterable[tuple[str, Strided, torch.Tensor]]) -> CopyPlan:
        """`pieces`: tensor of the layout, which of its elements, and this rank's memory for them (contiguous). What
        lies side by side on both sides becomes one move."""
        found: list[Move] = []
        for name, runs, ours in pieces:
            placed = layout.find(name)
            assert ours.dtype == torch.float32 and ours.is_contiguous() and ours.numel() == runs.size
            assert placed.start % FLOAT_BYTES == 0, "every tensor starts on a boundary of its element size"
            first = placed.start // FLOAT_BYTES + runs.start
            found.append(Move(ours, placed.file, Strided(first, runs.run, runs.stride, runs.count)))
        moves: list[Move] = []
        for move in sorted(found, key=lambda move: (move.file, move.runs.start)):
            if moves and (joined := _joined(moves[-1], move)):
                moves[-1] = joined
            else:
                moves.append(move)
        return cls(tuple(moves))

    def write(self, draft: Any) -> None:
        """Copy into `draft`."""
        files = self._files(draft)
        with ExitStack() as open_rings:
            rings = _Rings(open_rings)
            for move in self.moves:
                ring = rings.of(move)
                copy = _copy if ring is None else ring.to_host
                for ours, theirs in _pieces(move, files[move.file]):
                    copy(theirs, ours)

    def read(self, lease: Any) -> None:
        """Copy out of what is leased."""
        files = self._files(lease)
        with ExitStack() as open_rings:
            rings = _Rings(open_rings)
            for move in self.moves:
                ring = rings.of(move)
                copy = _copy if ring is None else ring.to_device
                for ours, theirs in _pieces(move, files[move.file]):
                    copy(ours, theirs)

    def _files(self, handle: Any) -> dict[str, torch.Tensor]:
        views = {name: handle.file_view(name) for name in {move.file for move in self.moves}}
        return {name: as_tensor(view, "U8", (view.nbytes,)) for name, view in views.items()}


class _Rings:
    """The staging ring of each device that a plan's tensors lie on, made when it is first needed."""

    def __init__(self, opened: ExitStack):
        self._opened = opened
        self._of: dict[torch.device, StagingRing] = {}

    def of(self, move: Move) -> StagingRing | None:
        """Returns None for what the processor copies by itself, and for columns, which the device gathers."""
        device = move.ours.device
        if in_host_memory(device) or move.runs.count > 1:
            return None
        if device not in self._of:
            ring = StagingRing(of_torch(device), _PIECE_ELEMENTS, _copy)
            self._of[device] = self._opened.enter_context(ring)
        return self._of[device]


def _joined(before: Move, after: Move) -> Move | None:
    """Both as one move, if they lie side by side, in this order, in one storage and in one file."""
    a, b = before.ours, after.ours
    adjacent = (
        before.file == after.file
        and before.runs.count == after.runs.count == 1
        and before.runs.stop == after.runs.start
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )
    if not adjacent:
        return None
    size = a.numel() + b.numel()
    return Move(a.as_strided((size,), (1,)), before.file, Strided(before.runs.start, size, size, 1))


def _pieces(move: Move, file: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    whole = file[: file.numel() // FLOAT_BYTES * FLOAT_BYTES].view(torch.float32)
    if move.runs.count > 1:
        yield move.ours.view(move.runs.count, move.runs.run), runs_view(whole, move.runs)
        return
    for first in range(0, move.runs.size, _PIECE_ELEMENTS):
        last = min(first + _PIECE_ELEMENTS, move.runs.size)
        yield move.ours[first:last], whole[move.runs.start + first : move.runs.start + last]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if not all(in_host_memory(tensor.device) and tensor.is_contiguous() for tensor in (target, source)):
        target.copy_(source)
        return
    # glibc writes long runs past the cache (runtime.processes.warm_parents.WARM_ENV), which torch's own copy never
    # does: half the time.
    libc.memmove(target.data_ptr(), source.data_ptr(), FLOAT_BYTES * source.numel())
