"""The arithmetic of shards: which bytes of a tensor a rank owns, and which copies turn N shards into M.

Pure integers. Ranges are half-open [start, stop). "Flat" means the row-major order of the tensor's elements,
in which ZeRO partitions; tensor parallelism cuts along one dimension instead. Byte ranges are relative to the
tensor's own first byte, ready to slice a `view(name)` of a draft or lease.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weights.format.errors import InvalidSlice
from weights.format.header import DTYPE_BITS, count_elements


@dataclass(frozen=True, order=True)
class Span:
    """[start, stop) of elements or bytes, as the function says."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise InvalidSlice(f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Strided:
    """`count` runs of `run` elements or bytes, the first at `start`, each `stride` after the one before."""

    start: int
    run: int
    stride: int
    count: int

    @property
    def size(self) -> int:
        """Elements or bytes in all runs together."""
        return self.run * self.count

    @property
    def stop(self) -> int:
        """Behind the end of the last run."""
        return self.start + (self.count - 1) * self.stride + self.run if self.count else self.start

    def spans(self) -> Iterator[Span]:
        """The runs in order."""
        for index in range(self.count):
            first = self.start + index * self.stride
            yield Span(first, first + self.run)


@dataclass(frozen=True)
class Copy:
    """Move `size` elements from offset `source_start` of shard `source` to `target_start` of shard `target`.

    Offsets count from the first element of the shard itself, not of the tensor.
    """

    source: int
    source_start: int
    target: int
    target_start: int
    size: int


def bytes_of(span: Span, dtype: str) -> Span:
    """The byte span of an element span. Raises InvalidSlice where a sub-byte dtype ends inside a byte."""
    bits = _bits(dtype)
    if span.start * bits % 8 or span.stop * bits % 8:
        raise InvalidSlice(f"elements [{span.start}, {span.stop}) of {dtype} do not lie on byte boundaries")
    return Span(span.start * bits // 8, span.stop * bits // 8)


def strided_bytes(strided: Strided, dtype: str) -> Strided:
    """The byte runs of element runs. Raises InvalidSlice where a sub-byte dtype ends inside a byte."""
    bits = _bits(dtype)
    elements = (strided.start, strided.run, strided.stride)
    if any(value * bits % 8 for value in elements):
        raise InvalidSlice(f"runs {strided} of {dtype} do not lie on byte boundaries")
    start, run, stride = (value * bits // 8 for value in elements)
    return Strided(start, run, stride, strided.count)


def flat_partition(numel: int, rank: int, world: int, *, multiple_of: int = 1) -> Span:
    """Elements of a flat tensor of `numel` that `rank` of `world` owns when all shards have equal length.

    The shard length is ceil(numel / world), rounded up to `multiple_of`; the tail beyond `numel` is padding
    that no span contains, so the last shards may be short or empty. This is how DeepSpeed ZeRO-3 partitions
    each parameter (`Init._partition_param`).
    """
    _check_rank(rank, world)
    if numel < 0 or multiple_of < 1:
        raise InvalidSlice(f"need numel >= 0 and multiple_of >= 1, got {numel} and {multiple_of}")
    length = -(-numel // world)
    length = -(-length // multiple_of) * multiple_of
    return Span(min(rank * length, numel), min((rank + 1) * length, numel))


def group_partition(numels: Sequence[int], rank: int, world: int, *, multiple_of: int = 1) -> list[Span]:
    """The same for a group flattened end to end, as ZeRO-1/2 does: per tensor, the elements `rank` owns.

    Empty spans (Span(0, 0)) stand where the rank owns nothing of a tensor.
    """
    owned = flat_partition(sum(numels), rank, world, multiple_of=multiple_of)
    spans, first = [], 0
    for numel in numels:
        start, stop = max(owned.start, first) - first, min(owned.stop, first + numel) - first
        spans.append(Span(start, stop) if start < stop else Span(0, 0))
        first += numel
    return spans


def tensor_parallel(shape: Sequence[int], dim: int, rank: int, world: int) -> Strided:
    """Element runs of the shard of `rank` when dimension `dim` is cut into `world` equal parts.

    Raises InvalidSlice if the dimension cannot be cut evenly.
    """
    _check_rank(rank, world)
    _check_dim(shape, dim)
    if shape[dim] % world:
        raise InvalidSlice(f"dimension {dim} of shape {tuple(shape)} cannot be cut into {world} equal parts")
    part = shape[dim] // world
    return narrow(shape, dim, rank * part, part)


def narrow(shape: Sequence[int], dim: int, start: int, length: int) -> Strided:
    """Element runs of `tensor.narrow(dim, start, length)` for a contiguous tensor of `shape`.

    One run where the slice is contiguous (cut along the first dimension, or all of `dim`).
    """
    _check_dim(shape, dim)
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise InvalidSlice(f"[{start}, {start + length}) is outside dimension {dim} of shape {tuple(shape)}")
    outer = count_elements(shape[:dim])
    inner = count_elements(shape[dim + 1 :])
    run, stride = length * inner, shape[dim] * inner
    if run == 0 or outer == 0:
        return Strided(0, 0, 0, 0)
    if outer == 1 or run == stride:
        return Strided(start * inner, run * outer, run * outer, 1)
    return Strided(start * inner, run, stride, outer)


def part(runs: Strided, start: int, size: int) -> Iterator[Strided]:
    """Elements [start, start + size) of `runs` laid end to end, in order: a piece of a run, whole runs, a piece of one.

    Raises InvalidSlice beyond the end of `runs`.
    """
    if start < 0 or size < 0 or start + size > runs.size:
        raise InvalidSlice(f"[{start}, {start + size}) is outside the {runs.size} elements of {runs}")
    while size:
        index, inside = divmod(start, runs.run)
        at = runs.start + index * runs.stride + inside
        if inside or size < runs.run:
            taken = Strided(at, run := min(size, runs.run - inside), run, 1)
        else:
            taken = Strided(at, runs.run, runs.stride, size // runs.run)
        yield taken
        start, size = start + taken.size, size - taken.size


def reshard(sources: Sequence[Span], targets: Sequence[Span]) -> list[Copy]:
    """The copies that build every target span of a flat tensor from source spans, for any N and M.

    Each element of a target is copied exactly once, from the lowest-numbered source that has it when several
    do (replicas). Raises InvalidSlice if a target contains an element that no source has.
    """
    pieces = _disjoint(sources)
    starts = [span.start for span, _ in pieces]
    copies: list[Copy] = []
    for target, wanted in enumerate(targets):
        position = wanted.start
        while position < wanted.stop:
            index = bisect_right(starts, position) - 1
            if index < 0 or pieces[index][0].stop <= position:
                raise InvalidSlice(f"element {position} of target {target} is in none of {len(sources)} sources")
            span, source = pieces[index]
            stop = min(span.stop, wanted.stop)
            copies.append(
                Copy(source, position - sources[source].start, target, position - wanted.start, stop - position)
            )
            position = stop
    return copies


def uncovered(spans: Iterable[Span], numel: int) -> list[Span]:
    """The parts of [0, numel) that no span covers: a writer's proof that nothing was left undefined."""
    gaps, position = [], 0
    for span in sorted(spans):
        if span.stop > numel:
            raise InvalidSlice(f"[{span.start}, {span.stop}) ends beyond the tensor's {numel} elements")
        if len(span) and span.start > position:
            gaps.append(Span(position, span.start))
        if len(span):
            position = max(position, span.stop)
    if position < numel:
        gaps.append(Span(position, numel))
    return gaps


def _disjoint(sources: Sequence[Span]) -> list[tuple[Span, int]]:
    """Non-overlapping pieces in order, each with the lowest-numbered source that has it."""
    edges = sorted({edge for span in sources for edge in (span.start, span.stop)})
    # Sweep over the edges with the set of sources that are open between two of them.
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for index, span in enumerate(sources):
        if len(span):
            opening.setdefault(span.start, []).append(index)
            closing.setdefault(span.stop, []).append(index)
    pieces: list[tuple[Span, int]] = []
    live: set[int] = set()
    for start, stop in zip(edges, edges[1:], strict=False):
        live.difference_update(closing.get(start, ()))
        live.update(opening.get(start, ()))
        if not live:
            continue
        lowest = min(live)
        if pieces and pieces[-1][1] == lowest and pieces[-1][0].stop == start:
            pieces[-1] = (Span(pieces[-1][0].start, stop), lowest)
        else:
            pieces.append((Span(start, stop), lowest))
    return pieces


def _bits(dtype: str) -> int:
    try:
        return DTYPE_BITS[dtype]
    except KeyError:
        raise InvalidSlice(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}") from None


def _check_rank(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise InvalidSlice(f"need 0 <= rank < world, got rank {rank} of world {world}")


def _check_dim(shape: Sequence[int], dim: int) -> None:
    if not 0 <= dim < len(shape):
        raise InvalidSlice(f"shape {tuple(shape)} has no dimension {dim}")
