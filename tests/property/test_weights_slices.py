"""Slices in = slices out, for every N -> M, every dtype, every cut."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.format.layout import ALIGN_BYTES, DTYPE_BITS, Layout, TensorSpec
from weights.format.torch_views import Strided, narrow, part
from weights.memory.segment import mappings
from weights.memory.store import WeightStore

worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
whole_byte = st.sampled_from([code for code, bits in DTYPE_BITS.items() if bits % 8 == 0])
tensor_names = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def specs(draw):
    names = draw(st.lists(tensor_names, min_size=1, max_size=12, unique=True))
    return [TensorSpec(name, draw(whole_byte), draw(shapes)) for name in names]


def elements(runs: Strided) -> list[int]:
    return [runs.start + number * runs.stride + at for number in range(runs.count) for at in range(runs.run)]


def own_bytes(spec: TensorSpec, rank: int, world: int) -> slice:
    return slice(spec.nbytes * rank // world, spec.nbytes * (rank + 1) // world)


def content(spec: TensorSpec) -> bytes:
    return hashlib.shake_128(spec.name.encode()).digest(spec.nbytes)


@given(specs(), st.integers(1, 4096))
def test_every_layout_is_tight_aligned_and_reads_back(tensors, max_file_bytes):
    layout = Layout.plan(tensors, max_file_bytes=max_file_bytes)
    assert sorted(placed.spec.name for placed in layout) == sorted(spec.name for spec in tensors)
    for file in layout.files:
        position = len(file.header)
        assert position % ALIGN_BYTES == 0
        for placed in file.tensors:
            assert placed.start == position and placed.nbytes == placed.spec.nbytes
            position = placed.end
            if placed.nbytes and placed.nbytes % ALIGN_BYTES == 0:
                assert placed.start % ALIGN_BYTES == 0
            if placed.nbytes:
                assert placed.start % (DTYPE_BITS[placed.spec.dtype] // 8) == 0
        assert position == file.nbytes
    with tempfile.TemporaryDirectory() as directory:
        for file in layout.files:
            (Path(directory) / file.name).write_bytes(file.header + bytes(file.nbytes - len(file.header)))
        index = layout.index_file()
        if index:
            (Path(directory) / index[0]).write_bytes(index[1])
        assert Layout.read(directory) == layout


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.data())
def test_narrow_is_numpys_slice(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    length = data.draw(st.integers(0, shape[dim] - start))
    array = np.arange(np.prod(shape)).reshape(shape)
    wanted = np.take(array, range(start, start + length), axis=dim).flatten()
    runs = narrow(shape, dim, start, length)
    assert elements(runs) == wanted.tolist() and runs.size == wanted.size


@settings(max_examples=25)
@given(specs(), worlds, worlds, st.integers(64, 4096))
def test_n_writers_m_readers_through_the_store(tensors, writers, readers, max_file_bytes):
    """Every rank writes its own range of every tensor, every reader reads its own: same bytes."""
    with tempfile.TemporaryDirectory() as directory:
        store = WeightStore(Path(directory) / "store", budget_bytes=None)
        layout = Layout.plan(tensors, max_file_bytes=max_file_bytes)
        draft = store.reserve(layout, kind="snapshot", model="job", version="step-1")
        for rank in range(writers):
            own = store.attach(draft.path, layout)
            for spec in tensors:
                mine = own_bytes(spec, rank, writers)
                own.view(spec.name)[mine] = content(spec)[mine]
            own.close()
        stored = draft.commit(meta={})
        with store.lease(stored) as lease:
            for spec in tensors:
                parts = [bytes(lease.view(spec.name)[own_bytes(spec, rank, readers)]) for rank in range(readers)]
                assert b"".join(parts) == content(spec)
        store.remove(stored)
        mappings.clear()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]))
def test_slices_cut_again_by_zero_cover_a_matrix_once(rows, columns, shards, groups, dim):
    """Tensor parallelism cuts a matrix along a dimension, ZeRO what a rank has of it anywhere."""
    shape = (rows * shards, columns) if dim == 0 else (rows, columns * shards)
    matrix = np.arange(shape[0] * shape[1])
    seen = []
    for rank in range(shards):
        length = shape[dim] // shards
        runs = narrow(shape, dim, rank * length, length)
        held = np.split(matrix.reshape(shape), shards, axis=dim)[rank].ravel()
        for group in range(groups):
            first, last = runs.size * group // groups, runs.size * (group + 1) // groups
            found = [int(matrix[at]) for piece in part(runs, first, last - first) for at in elements(piece)]
            assert found == held[first:last].tolist()
            seen += found
    assert sorted(seen) == list(matrix)
