"""The arithmetic of slices against torch."""

from __future__ import annotations

import pytest
import torch

from weights.format.errors import InvalidSlice
from weights.format.slices import Strided, narrow, part


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_narrow_is_torchs(dim):
    tensor = torch.arange(4 * 6 * 8).reshape(4, 6, 8)
    runs = narrow(tensor.shape, dim, 1, 2)
    found = tensor.flatten().as_strided((runs.count, runs.run), (runs.stride, 1), runs.start).flatten()
    assert torch.equal(found, tensor.narrow(dim, 1, 2).flatten()) and runs.size == found.numel()


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


@pytest.mark.parametrize("given", [((4, 4), 0, 2, 3), ((4, 4), 0, -1, 3), ((4, 4), 2, 0, 2), ((4, 4), -1, 0, 2)])
def test_slices_outside_the_tensor_are_refused(given):
    with pytest.raises(InvalidSlice):
        narrow(*given)
