"""Shard arithmetic against torch and DeepSpeed's own formulas."""

from __future__ import annotations

import pytest
import torch

from weights.format.errors import InvalidSlice
from weights.format.slices import (
    Copy,
    Span,
    Strided,
    bytes_of,
    flat_partition,
    group_partition,
    narrow,
    part,
    reshard,
    strided_bytes,
    tensor_parallel,
    uncovered,
)


def test_flat_partition_is_zero_threes():
    """DeepSpeed: n = ceil(numel / world), start = n * rank, valid = clamp(numel - start, 0, n)."""
    for numel in (0, 1, 7, 8, 9, 1000):
        for world in (1, 2, 3, 8):
            n = -(-numel // world)
            for rank in range(world):
                span = flat_partition(numel, rank, world)
                assert len(span) == max(0, min(n, numel - n * rank))
                if len(span):
                    assert span.start == n * rank


def test_flat_partition_pads_shards_to_a_multiple():
    assert [flat_partition(10, rank, 2, multiple_of=4) for rank in range(2)] == [Span(0, 8), Span(8, 10)]
    assert flat_partition(3, 3, 4, multiple_of=2) == Span(3, 3)


def test_group_partition_cuts_across_tensors():
    assert group_partition([5, 0, 3, 8], 0, 2) == [Span(0, 5), Span(0, 0), Span(0, 3), Span(0, 0)]
    assert group_partition([5, 0, 3, 8], 1, 2) == [Span(0, 0), Span(0, 0), Span(0, 0), Span(0, 8)]
    assert group_partition([5, 3, 8], 1, 3) == [Span(0, 0), Span(1, 3), Span(0, 4)]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensor_parallel_is_torchs_chunk(dim):
    tensor = torch.arange(4 * 6 * 8).reshape(4, 6, 8)
    flat = tensor.flatten()
    for rank, chunk in enumerate(torch.chunk(tensor, 2, dim)):
        runs = tensor_parallel(tensor.shape, dim, rank, 2)
        found = torch.cat([flat[span.start : span.stop] for span in runs.spans()])
        assert torch.equal(found, chunk.flatten())
        assert runs.size == chunk.numel()


def test_contiguous_slices_are_one_run():
    assert narrow((6, 4), 0, 2, 3) == Strided(8, 12, 12, 1)
    assert narrow((6, 4), 1, 0, 4) == Strided(0, 24, 24, 1)
    assert narrow((1, 4), 1, 1, 2) == Strided(1, 2, 2, 1)
    assert narrow((6, 4), 1, 1, 2) == Strided(1, 2, 4, 6)
    assert narrow((6, 4), 1, 1, 0) == narrow((0, 4), 1, 1, 2) == Strided(0, 0, 0, 0)


def test_a_part_of_runs_is_at_most_an_end_whole_runs_and_a_beginning():
    runs = narrow((6, 4), 1, 1, 3)  # columns 1 to 3
    assert list(part(runs, 1, 13)) == [Strided(2, 2, 2, 1), Strided(5, 3, 4, 3), Strided(17, 2, 2, 1)]
    assert list(part(runs, 3, 6)) == [Strided(5, 3, 4, 2)] and list(part(runs, 4, 1)) == [Strided(6, 1, 1, 1)]
    assert list(part(runs, 5, 0)) == [] and list(part(Strided(8, 12, 12, 1), 2, 9)) == [Strided(10, 9, 9, 1)]
    assert runs.stop == 24 and Strided(0, 0, 0, 0).stop == 0
    with pytest.raises(InvalidSlice, match="outside the 18 elements"):
        list(part(runs, 10, 9))


def test_bytes_of_elements():
    assert bytes_of(Span(3, 5), "BF16") == Span(6, 10)
    assert bytes_of(Span(2, 4), "F4") == Span(1, 2)
    assert strided_bytes(Strided(1, 2, 4, 6), "F32") == Strided(4, 8, 16, 6)
    with pytest.raises(InvalidSlice, match="byte boundaries"):
        bytes_of(Span(1, 4), "F4")
    with pytest.raises(InvalidSlice, match="byte boundaries"):
        strided_bytes(Strided(1, 2, 4, 6), "F4")
    with pytest.raises(InvalidSlice, match="unknown dtype"):
        bytes_of(Span(0, 1), "float32")


def test_reshard_two_to_three():
    assert reshard([Span(0, 6), Span(6, 12)], [Span(0, 4), Span(4, 8), Span(8, 12)]) == [
        Copy(0, 0, 0, 0, 4),
        Copy(0, 4, 1, 0, 2),
        Copy(1, 0, 1, 2, 2),
        Copy(1, 2, 2, 0, 4),
    ]


def test_reshard_takes_replicated_elements_once_from_the_lowest_source():
    assert reshard([Span(2, 6), Span(0, 8), Span(0, 8)], [Span(0, 8)]) == [
        Copy(1, 0, 0, 0, 2),
        Copy(0, 0, 0, 2, 4),
        Copy(1, 6, 0, 6, 2),
    ]


def test_reshard_refuses_what_nobody_has():
    with pytest.raises(InvalidSlice, match="element 4 of target 1"):
        reshard([Span(0, 4), Span(5, 9)], [Span(0, 4), Span(3, 9)])
    with pytest.raises(InvalidSlice, match="element 0"):
        reshard([], [Span(0, 1)])
    assert reshard([], [Span(0, 0)]) == []


def test_uncovered_finds_what_was_left_out():
    assert uncovered([Span(0, 4), Span(4, 8)], 8) == []
    assert uncovered([Span(6, 8), Span(1, 3), Span(2, 4), Span(5, 5)], 10) == [Span(0, 1), Span(4, 6), Span(8, 10)]
    assert uncovered([], 0) == []
    with pytest.raises(InvalidSlice, match="beyond"):
        uncovered([Span(0, 9)], 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Span(3, 2),
        lambda: Span(-1, 2),
        lambda: flat_partition(10, 2, 2),
        lambda: flat_partition(10, -1, 2),
        lambda: flat_partition(10, 0, 0),
        lambda: flat_partition(-1, 0, 1),
        lambda: tensor_parallel((5, 4), 0, 0, 2),
        lambda: tensor_parallel((4, 4), 2, 0, 2),
        lambda: narrow((4, 4), 0, 2, 3),
        lambda: narrow((4, 4), 0, -1, 3),
    ],
)
def test_shards_that_do_not_fit(call):
    with pytest.raises(InvalidSlice):
        call()
