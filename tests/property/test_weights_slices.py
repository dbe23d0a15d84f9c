"""Slices in = slices out, for every N -> M, every dtype, every cut."""

from __future__ import annotations

import hashlib
import tempfile
from math import lcm
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.format.header import DTYPE_BITS
from weights.format.layout import Layout, TensorSpec
from weights.format.slices import (
    Span,
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
from weights.memory.segment import forget_mappings
from weights.memory.store import WeightStore

worlds = st.integers(1, 9)
multiples = st.sampled_from([1, 2, 3, 8, 64])
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
whole_byte = st.sampled_from([code for code, bits in DTYPE_BITS.items() if bits % 8 == 0])
tensor_names = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def specs(draw):
    names = draw(st.lists(tensor_names, min_size=1, max_size=12, unique=True))
    return [TensorSpec(name, draw(whole_byte), draw(shapes)) for name in names]


def content(spec: TensorSpec) -> bytes:
    return hashlib.shake_128(spec.name.encode()).digest(spec.nbytes)


@given(specs(), st.integers(1, 4096), st.sampled_from([1, 8, 64, 4096]))
def test_every_layout_is_tight_aligned_and_reads_back(tensors, max_file_bytes, align_bytes):
    layout = Layout.plan(tensors, max_file_bytes=max_file_bytes, align_bytes=align_bytes)
    assert sorted(layout.names) == sorted(spec.name for spec in tensors)
    for file in layout.files:
        position = len(file.header)
        assert position % max(align_bytes, 8) == 0
        for placed in file.tensors:
            assert placed.start == position and placed.nbytes == placed.spec.nbytes
            position = placed.end
            if placed.nbytes and placed.nbytes % align_bytes == 0:
                assert placed.start % align_bytes == 0
            if placed.nbytes:
                assert placed.start % min(DTYPE_BITS[placed.spec.dtype] // 8, align_bytes) == 0
        assert position == file.nbytes
    with tempfile.TemporaryDirectory() as directory:
        for file in layout.files:
            (Path(directory) / file.name).write_bytes(file.header + bytes(file.nbytes - len(file.header)))
        index = layout.index_file()
        if index:
            (Path(directory) / index[0]).write_bytes(index[1])
        assert Layout.read(directory) == layout


@given(st.integers(0, 5000), worlds, worlds, multiples, multiples)
def test_resharding_moves_every_element_once(numel, many, few, pad_many, pad_few):
    sources = [flat_partition(numel, rank, many, multiple_of=pad_many) for rank in range(many)]
    targets = [flat_partition(numel, rank, few, multiple_of=pad_few) for rank in range(few)]
    assert uncovered(sources, numel) == [] and sum(map(len, sources)) == numel
    whole = np.arange(numel)
    shards = [whole[span.start : span.stop] for span in sources]
    made = [np.full(len(span), -1) for span in targets]
    for copy in reshard(sources, targets):
        assert copy.size > 0
        into = made[copy.target][copy.target_start : copy.target_start + copy.size]
        assert (into == -1).all(), "copied twice"
        into[:] = shards[copy.source][copy.source_start : copy.source_start + copy.size]
    for span, shard in zip(targets, made, strict=True):
        assert np.array_equal(shard, whole[span.start : span.stop])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=6), st.integers(0, 60))
def test_any_sources_even_overlapping_ones(edges, stop):
    sources = [Span(*edge) for edge in edges]
    covered = {element for span in sources for element in range(span.start, span.stop)}
    target = Span(0, stop)
    if not set(range(stop)) <= covered:
        try:
            reshard(sources, [target])
        except ValueError as error:
            first = min(set(range(stop)) - covered)
            assert f"element {first} " in str(error)
            return
        raise AssertionError("a hole went unnoticed")
    got = [
        sources[copy.source].start + copy.source_start + i
        for copy in reshard(sources, [target])
        for i in range(copy.size)
    ]
    assert got == list(range(stop))


@given(st.lists(st.integers(0, 300), max_size=8), worlds, multiples)
def test_a_flattened_group_is_partitioned_without_loss(numels, world, multiple_of):
    owned = [group_partition(numels, rank, world, multiple_of=multiple_of) for rank in range(world)]
    for index, numel in enumerate(numels):
        parts = [spans[index] for spans in owned]
        assert uncovered(parts, numel) == [] and sum(map(len, parts)) == numel


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.data())
def test_narrow_is_numpys_slice(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    length = data.draw(st.integers(0, shape[dim] - start))
    array = np.arange(np.prod(shape)).reshape(shape)
    wanted = np.take(array, range(start, start + length), axis=dim).flatten()
    runs = narrow(shape, dim, start, length)
    found = [element for span in runs.spans() for element in range(span.start, span.stop)]
    assert found == wanted.tolist() and runs.size == wanted.size


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 5), whole_byte, st.data())
def test_tensor_parallel_shards_cover_the_bytes_exactly(shape, world, dtype, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= world
    nbytes = TensorSpec("t", dtype, tuple(shape)).nbytes
    spans = [
        span for rank in range(world) for span in strided_bytes(tensor_parallel(shape, dim, rank, world), dtype).spans()
    ]
    assert uncovered(spans, nbytes) == [] and sum(map(len, spans)) == nbytes


@settings(max_examples=25)
@given(specs(), worlds, worlds, multiples, st.integers(64, 4096))
def test_n_writers_m_readers_through_the_store(tensors, writers, readers, multiple_of, max_file_bytes):
    """Every rank writes its own flat range of every tensor, every reader reads its own: same bytes."""
    with tempfile.TemporaryDirectory() as directory:
        store = WeightStore(Path(directory) / "store", budget_bytes=None)
        layout = Layout.plan(tensors, max_file_bytes=max_file_bytes)
        draft = store.reserve(layout, kind="snapshot", model="job", version="step-1")
        for rank in range(writers):
            own = store.attach(draft.path)
            for spec in tensors:
                part = bytes_of(flat_partition(spec.numel, rank, writers, multiple_of=multiple_of), spec.dtype)
                own.view(spec.name)[part.start : part.stop] = content(spec)[part.start : part.stop]
            own.close()
        stored = draft.commit(meta={})
        with store.lease(stored) as lease:
            for spec in tensors:
                parts = [bytes_of(flat_partition(spec.numel, rank, readers), spec.dtype) for rank in range(readers)]
                assert b"".join(bytes(lease.view(spec.name)[part.start : part.stop]) for part in parts) == content(spec)
        store.remove(stored)
        forget_mappings()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]))
def test_slices_cut_again_by_zero_cover_a_matrix_once(rows, columns, shards, groups, dim):
    """Tensor parallelism cuts a matrix along a dimension, ZeRO what a rank has of it anywhere."""
    shape = (rows * shards, columns) if dim == 0 else (rows, columns * shards)
    matrix = np.arange(shape[0] * shape[1])
    seen = []
    for rank in range(shards):
        runs = tensor_parallel(shape, dim, rank, shards)
        held = np.split(matrix.reshape(shape), shards, axis=dim)[rank].ravel()
        for group in range(groups):
            owned = flat_partition(runs.size, group, groups)
            pieces = [span for piece in part(runs, owned.start, len(owned)) for span in piece.spans()]
            found = [element for span in pieces for element in matrix[span.start : span.stop]]
            assert found == list(held[owned.start : owned.stop])
            seen += found
    assert sorted(seen) == list(matrix)


CUTS = ("zero3", "zero2", "tensor parallel")


def own_ranges(cut: str, tensors: list[TensorSpec], rank: int, world: int, multiple_of: int) -> dict[str, list[Span]]:
    """Byte ranges of each tensor that this rank owns, in the order of its shard."""
    if cut == "zero2":
        spans = group_partition([spec.numel for spec in tensors], rank, world, multiple_of=multiple_of)
        return {spec.name: [bytes_of(span, spec.dtype)] for spec, span in zip(tensors, spans, strict=True)}
    if cut == "zero3":
        return {spec.name: [bytes_of(flat_partition(spec.numel, rank, world, multiple_of=multiple_of), spec.dtype)]
                for spec in tensors}  # fmt: skip
    runs = [tensor_parallel(spec.shape, 0 if index % 2 else len(spec.shape) - 1, rank, world)
            for index, spec in enumerate(tensors)]  # fmt: skip
    return {spec.name: [*strided_bytes(own, spec.dtype).spans()] for spec, own in zip(tensors, runs, strict=True)}


def shard(cut: str, whole: dict[str, np.ndarray], rank: int, world: int, multiple_of: int) -> dict[str, bytes]:
    """What this rank holds of each tensor, cut by numpy alone."""
    def cut_flat(elements: int) -> tuple[int, int]:
        length = (elements + world - 1) // world
        while length % multiple_of:
            length += 1
        return rank * length, (rank + 1) * length

    if cut == "tensor parallel":
        return {name: np.split(array, world, axis=0 if index % 2 else array.ndim - 1)[rank].tobytes()
                for index, (name, array) in enumerate(whole.items())}  # fmt: skip
    if cut == "zero3":
        return {name: array.ravel()[slice(*cut_flat(array.size))].tobytes() for name, array in whole.items()}
    first, last = cut_flat(sum(array.size for array in whole.values()))
    found, before = {}, 0
    for name, array in whole.items():
        found[name] = array.ravel()[max(0, first - before) : max(0, last - before)].tobytes()
        before += array.size
    return found


@settings(max_examples=40)
@given(st.sampled_from(CUTS), st.sampled_from(CUTS), st.integers(1, 4), st.integers(1, 4), multiples, st.data())
def test_whatever_cut_the_writers_any_other_cut_reads_its_own(written, read, writers, readers, multiple_of, data):
    """ZeRO by parameter, by group or tensor parallelism on either side: each writer writes only its shard, from memory
    of its own; each reader gets what numpy says is its shard."""
    even = lcm(writers, readers)
    shapes = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4))
    tensors = [TensorSpec(f"t{number}", data.draw(whole_byte), tuple(even * extent for extent in shape))
               for number, shape in enumerate(shapes)]  # fmt: skip
    whole = {spec.name: np.frombuffer(content(spec), f"V{DTYPE_BITS[spec.dtype] // 8}").reshape(spec.shape)
             for spec in tensors}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        store = WeightStore(Path(directory) / "store", budget_bytes=None)
        layout = Layout.plan(tensors, max_file_bytes=data.draw(st.sampled_from([200, 10**6])))
        draft = store.reserve(layout, kind="snapshot", model="job", version="step-1", writers=writers)
        covered: dict[str, list[Span]] = {spec.name: [] for spec in tensors}
        for rank in range(writers):
            own, mine = store.attach(draft.path), shard(written, whole, rank, writers, multiple_of)
            for name, spans in own_ranges(written, tensors, rank, writers, multiple_of).items():
                at, covered[name] = 0, covered[name] + spans
                for span in spans:
                    own.view(name)[span.start : span.stop] = mine[name][at : at + len(span)]
                    at += len(span)
                assert at == len(mine[name]), "all of the shard, and nothing else"
            own.mark_written(rank)
            own.close()
        for spec in tensors:
            assert uncovered(covered[spec.name], spec.nbytes) == []
            assert sum(map(len, covered[spec.name])) == spec.nbytes, "nothing is written twice"
        draft.wait_written()
        with store.lease(draft.commit(meta={})) as lease:
            for rank in range(readers):
                wanted = shard(read, whole, rank, readers, multiple_of)
                for name, spans in own_ranges(read, tensors, rank, readers, multiple_of).items():
                    view = lease.view(name)
                    assert b"".join(bytes(view[span.start : span.stop]) for span in spans) == wanted[name]
        del view
        forget_mappings()
