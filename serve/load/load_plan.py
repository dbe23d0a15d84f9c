"""Records which bytes of a version go where in the model by watching one load.

Every vLLM model has a `load_weights` that maps checkpoint names to fused, sliced and padded parameters. The first load
runs under a dispatch mode that records each `copy_` from the mapped files into a parameter. Later versions are loaded
by repeating the recorded copies; under tensor parallelism these are exactly the slices that this worker reads. A
parameter that mapped bytes and zeros do not fill is `unplanned`; if nothing else wrote it, it is also `unwritten`.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.devices.kinds import in_host_memory
from serve.core.errors import VersionMismatch
from serve.load.host_ring import HostRing
from serve.load.shm_source import VersionSource

# Ends of the names of checkpoint tensors that models ignore, because they compute these tensors themselves.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias")


@dataclass(frozen=True)
class Region:
    """A strided block inside a flat tensor; offset and strides in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> Region:
        return cls(offset, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def extent(self) -> int:
        """Return the number of elements from the region's first to its last, gaps included."""
        if not self.numel:
            return 0
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.size, self.stride, strict=True))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of this region in the one-dimensional tensor `flat`."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    @property
    def dense(self) -> bool:
        """Whether the region is contiguous in row-major order."""
        expected = 1
        for extent, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


@dataclass(frozen=True)
class Piece:
    """One copy from region `source` of the stored tensor `name` to region `target` of a parameter."""

    target: Region
    name: str
    source: Region


@dataclass
class Target:
    """A parameter or buffer of the model in the checkpoint's layout, with the pieces that fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    zeroed: list[Region] = field(default_factory=list)

    @property
    def covered(self) -> bool:
        """Whether every element is written by a piece or zeroed (vocabulary padding)."""
        seen = {piece.target: piece.target.numel for piece in self.pieces}
        seen |= {region: region.numel for region in self.zeroed}
        return sum(seen.values()) >= math.prod(self.shape)

    def fill(self, flat: torch.Tensor, source: VersionSource, ring: HostRing | None = None) -> None:
        """Write the whole target into the one-dimensional `flat` on any device; on a GPU copies may outlast the call.

        `ring` copies the data that the device cannot read in place at full rate: columns, other dtypes, unlocked pages.
        """
        for region in self.zeroed:
            region.view(flat).zero_()
        for piece in self.pieces:
            whole = source.tensor(piece.name).reshape(-1)
            runs = _runs(piece, whole, source) if whole.dtype == flat.dtype and ring is not None else None
            target = piece.target.view(flat)
            if runs is not None:
                begin = piece.source.offset
                into = target.reshape(-1)
                for first, last in runs:
                    into[first - begin : last - begin].copy_(whole[first:last], non_blocking=True)
            elif ring is not None:
                ring.copy(target, piece.source.view(whole))
            else:
                target.copy_(piece.source.view(whole), non_blocking=True)

    def mapped_view(self, source: VersionSource) -> torch.Tensor | None:
        """A read-only view of the whole target in the mapped file; None if its pieces are not adjacent there."""
        pieces = sorted(self.pieces, key=lambda piece: piece.target.offset)
        parts = [piece.source.view(source.tensor(piece.name).reshape(-1)) for piece in pieces]
        dense = all(piece.source.dense and piece.target.dense for piece in pieces)
        if self.zeroed or not parts or not dense or any(part.dtype != self.dtype for part in parts):
            return None
        offset, address = 0, parts[0].data_ptr()
        for piece, part in zip(pieces, parts, strict=True):
            if (piece.target.offset, part.data_ptr()) != (offset, address):
                return None
            offset, address = offset + part.numel(), address + part.nbytes
        return parts[0].as_strided(self.shape, torch.empty(self.shape, device="meta").stride())


def _runs(piece: Piece, whole: torch.Tensor, source: VersionSource) -> list[tuple[int, int]] | None:
    """Return runs [first, last) of the stored tensor's elements, one copy each; None unless dense, aligned, locked."""
    if not (piece.source.dense and piece.target.dense and source.aligned(piece.name)):
        return None
    item, start = whole.element_size(), piece.source.offset
    runs = source.locked_runs(piece.name, start * item, (start + piece.source.numel) * item)
    return runs and [(first // item, last // item) for first, last in runs]


@dataclass
class LoadPlan:
    """Copies that load a version into a model.

    Keys of `targets` are `(id(module), attribute)`; modules that share a parameter share one Target object, and the
    keys are in model order.
    """

    targets: dict[tuple[int, str], Target]
    unplanned: list[str]
    unwritten: list[str]
    expected: dict[str, torch.Tensor]
    read: frozenset[str]

    def follow_first_load(self, model: torch.nn.Module) -> str:
        """Return the stored tensor of a parameter that vLLM filled and then replaced by another parameter, "" if there
        is none: vLLM ties a head whose values equal the embedding's (vllm/model_executor/model_loader/weight_tying.py).
        """
        kept: dict[int, Target] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                target = self.targets.get((id(module), name))
                if target is None or tensor is None:
                    continue
                if kept.setdefault(id(tensor), target) is not target:
                    return target.pieces[0].name if target.pieces else name
        return ""

    @property
    def complete(self) -> bool:
        return not self.unplanned

    def check(self, source: VersionSource) -> None:
        """Compare a version's tensors with those of the version that this engine was built from. Raises VersionMismatch
        naming the tensors. vLLM only warns of missing tensors; the engine would then mix two models."""
        problems = []
        for name in sorted(self.read):
            stored, expected = source.described.get(name), self.expected[name]
            if stored is None:
                problems.append(f"{name} is missing")
                continue
            floats = stored.dtype.is_floating_point and expected.dtype.is_floating_point
            if stored.shape != expected.shape or (stored.dtype != expected.dtype and not floats):
                of, other = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (stored, expected))
                problems.append(f"{name} is {of}, expected {other}")
        unknown = sorted(source.described.keys() - self.expected)
        problems += [f"{name} is not part of this model" for name in unknown if not name.endswith(IGNORED_SUFFIXES)]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise VersionMismatch(
                f"version {source.path} does not fit the running engine: {'; '.join(problems[:8])}{more}. "
                "Start a new engine for it instead of swapping."
            )

    def bytes_read(self, source: VersionSource) -> int:
        """Return how many bytes of the version this worker reads (under tensor parallelism only its slices)."""
        return sum(piece.source.numel * source.described[piece.name].dtype.itemsize for piece in self._pieces())

    def spans(self, source: VersionSource, *, in_one_piece: bool = False) -> dict[str, list[tuple[int, int]]]:
        """Return the byte ranges [start, end) that this worker reads, by file. in_one_piece: exclude columns of a
        row-parallel matrix, which are gathered before the copy."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for piece in self._pieces():
            if in_one_piece and not piece.source.dense:
                continue
            placed, itemsize = source.layout.find(piece.name), source.described[piece.name].dtype.itemsize
            start = placed.start + piece.source.offset * itemsize
            spans.setdefault(placed.file, []).append((start, start + piece.source.extent * itemsize))
        return spans

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all targets, those of a shared target once."""
        for target in {id(target): target for target in self.targets.values()}.values():
            yield from target.pieces


class LoadRecorder(TorchDispatchMode):
    """Records one `load_weights` call that reads from `source` as a LoadPlan."""

    def __init__(self, model: torch.nn.Module, source: VersionSource):
        super().__init__()
        self._source = source
        self._starts = sorted((tensor.data_ptr(), name) for name, tensor in source.tensors() if tensor.numel())
        self._owners: dict[int, list[tuple[int, str, str, torch.Tensor]]] = {}
        self._targets: dict[int, Target] = {}
        self._odd: set[int] = set()
        self._clones: dict[int, tuple[str, int, torch.Tensor]] = {}
        self._read: set[str] = set()
        for prefix, module in model.named_modules():
            tensors = {**module._parameters, **module._buffers}
            for attribute, tensor in tensors.items():
                if tensor is None or tensor.is_meta or not tensor.numel():
                    continue
                key = tensor.untyped_storage().data_ptr()
                full_name = f"{prefix}.{attribute}" if prefix else attribute
                self._owners.setdefault(key, []).append((id(module), attribute, full_name, tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Tensor):
            self._note_fill(args[0], 0 if func is torch.ops.aten.zero_.default else args[1])
        elif func._schema.is_mutable:
            self._note_odd(args)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and args[0].is_contiguous() and (origin := self._stored(args[0])):
            self._clones[result.data_ptr()] = (*origin, result)
        return result

    def plan(self) -> LoadPlan:
        """Return all copies recorded so far as a LoadPlan."""
        targets: dict[tuple[int, str], Target] = {}
        unplanned, unwritten = list[str](), list[str]()
        for key, owners in self._owners.items():
            target, odd = self._targets.get(key), key in self._odd
            if target is not None and target.covered and not odd:
                targets |= {(module_id, attribute): target for module_id, attribute, _, _ in owners}
                continue
            weight = any(isinstance(tensor, torch.nn.Parameter) for *_, tensor in owners)
            if weight or target is not None:
                unplanned.append(owners[0][2])
            if weight and not odd:
                unwritten.append(owners[0][2])
        return LoadPlan(
            targets, sorted(unplanned), sorted(unwritten), dict(self._source.described), frozenset(self._read)
        )

    def _target(self, tensor: torch.Tensor) -> tuple[int, Target] | None:
        key = tensor.untyped_storage().data_ptr()
        owners = self._owners.get(key)
        if owners is None:
            return None
        whole = owners[0][3]
        if not whole.is_contiguous() or whole.storage_offset():
            self._odd.add(key)
            return None
        return key, self._targets.setdefault(key, Target(tuple(whole.shape), whole.dtype))

    def _stored(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return (name, element offset) of the stored tensor that this tensor is a view or clone of. vLLM clones the
        first tensors of an embedding model (vllm/model_executor/models/adapters.py)."""
        if not in_host_memory(tensor.device) or not tensor.numel():
            return None
        if clone := self._clones.get(tensor.untyped_storage().data_ptr()):
            return clone[0], clone[1] + tensor.storage_offset()
        address = tensor.data_ptr()
        start, name = self._starts[bisect(self._starts, address, key=lambda pair: pair[0]) - 1]
        described = self._source.described[name]
        offset = (address - start) // described.dtype.itemsize
        return (name, offset) if 0 <= offset < math.prod(described.shape) else None

    def _note_copy(self, into: torch.Tensor, origin: torch.Tensor) -> None:
        name, offset = self._stored(origin) or (None, 0)
        if name is not None:
            self._read.add(name)
        target = self._target(into)
        if target is None:
            return
        if name is None or origin.dtype != self._source.described[name].dtype or into.shape != origin.shape:
            self._odd.add(target[0])
            return
        target[1].pieces.append(Piece(Region.of(into, into.storage_offset()), name, Region.of(origin, offset)))

    def _note_fill(self, into: torch.Tensor, value: object) -> None:
        target = self._target(into)
        if target is None:
            return
        if value == 0:
            target[1].zeroed.append(Region.of(into, into.storage_offset()))
        else:
            self._odd.add(target[0])

    def _note_odd(self, args: tuple) -> None:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                key = tensor.untyped_storage().data_ptr()
                if key in self._owners:
                    self._odd.add(key)
