"""Computes which elements of a contiguous tensor a shard has, as runs of equal length.

Pure integers, in the row-major order of the tensor's elements. Ranges are half-open [start, stop).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from weights.format.errors import InvalidLayout


@dataclass(frozen=True)
class Strided:
    """`count` runs of `run` elements: the first starts at `start`, each of the others `stride` after the one before."""

    start: int
    run: int
    stride: int
    count: int

    @property
    def size(self) -> int:
        """Elements in all runs together."""
        return self.run * self.count


def narrow(shape: Sequence[int], dim: int, start: int, length: int) -> Strided:
    """Element runs of `tensor.narrow(dim, start, length)` for a contiguous tensor of `shape`.

    One run if the slice is contiguous (cut along the first dimension, or all of `dim`).
    """
    if not 0 <= dim < len(shape):
        raise InvalidLayout(f"shape {tuple(shape)} has no dimension {dim}")
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise InvalidLayout(f"[{start}, {start + length}) is outside dimension {dim} of shape {tuple(shape)}")
    outer = prod(shape[:dim])
    inner = prod(shape[dim + 1 :])
    run, stride = length * inner, shape[dim] * inner
    if run == 0 or outer == 0:
        return Strided(0, 0, 0, 0)
    if outer == 1 or run == stride:
        return Strided(start * inner, run * outer, run * outer, 1)
    return Strided(start * inner, run, stride, outer)


def part(runs: Strided, start: int, size: int) -> Iterator[Strided]:
    """Elements [start, start + size) of the concatenated `runs`, in order: part of a run, whole runs, part of a run.

    Raises InvalidLayout beyond the end of `runs`.
    """
    if start < 0 or size < 0 or start + size > runs.size:
        raise InvalidLayout(f"[{start}, {start + size}) is outside the {runs.size} elements of {runs}")
    while size:
        index, inside = divmod(start, runs.run)
        at = runs.start + index * runs.stride + inside
        if inside or size < runs.run:
            taken = Strided(at, run := min(size, runs.run - inside), run, 1)
        else:
            taken = Strided(at, runs.run, runs.stride, size // runs.run)
        yield taken
        start, size = start + taken.size, size - taken.size
