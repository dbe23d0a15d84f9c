"""Weight files: N writers and M readers see the same slices; arbitrary bytes are refused by name or load completely."""

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from weights.format.errors import IntegrityError
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
def test_layout_is_tight_aligned_and_reads_back(tensors, max_file_bytes):
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
def test_narrow_equals_numpy_slice(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    length = data.draw(st.integers(0, shape[dim] - start))
    array = np.arange(np.prod(shape)).reshape(shape)
    wanted = np.take(array, range(start, start + length), axis=dim).flatten()
    runs = narrow(shape, dim, start, length)
    assert elements(runs) == wanted.tolist() and runs.size == wanted.size


@settings(max_examples=25)
@given(specs(), worlds, worlds, st.integers(64, 4096))
def test_store_n_writers_m_readers_see_same_bytes(tensors, writers, readers, max_file_bytes):
    """Each rank writes its own range of every tensor, and each reader reads its own range."""
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
def test_zero_shares_of_slices_cover_matrix_once(rows, columns, shards, groups, dim):
    """Tensor parallelism cuts a matrix along a dimension, ZeRO cuts the slice of a rank at any element."""
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


odd_numbers = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 1.5, float("nan"), True, None, "8"])
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "f32", "", None, 3]),
        "shape": st.one_of(st.lists(odd_numbers, max_size=4), odd_numbers),
        "data_offsets": st.one_of(st.lists(odd_numbers, max_size=3), odd_numbers),
    }
)


def judge(raw: bytes) -> bool:
    """Whether the layout accepts `raw`; what it accepts must load in the library."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(raw)
        try:
            layout = Layout.read(directory)
        except IntegrityError:
            return False
        with safe_open(path, "numpy") as opened:
            assert set(opened.keys()) == {placed.spec.name for placed in layout}
            for placed in layout:
                assert tuple(opened.get_slice(placed.spec.name).get_shape()) == placed.spec.shape
        return True


@given(st.dictionaries(st.text(max_size=8), entries, max_size=4), st.binary(max_size=64))
def test_random_headers_are_refused_or_load(body, data):
    text = json.dumps(body).encode()
    judge(struct.pack("<Q", len(text)) + text + data)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_load(raw):
    judge(raw)


@given(st.integers(0, 10**6), st.integers(0, 7), st.integers(-3, 3))
def test_mutated_file_is_refused_or_loads(position, bit, resize):
    """After a flipped bit, truncation or extension, a valid file is refused or still loads completely."""
    layout = Layout.plan([TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", (5,)), TensorSpec("c", "U8", ())])
    header = layout.files[0].header
    raw = bytearray(header + bytes(layout.nbytes - len(header)))
    raw[position % len(header)] ^= 1 << bit
    raw = raw[:resize] if resize < 0 else raw + bytes(resize)
    assert not (judge(bytes(raw)) and resize)
