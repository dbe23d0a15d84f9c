"""Maps each tensor of a version to its safetensors file and byte range.

Format (safetensors README and its Rust `SafeTensors::deserialize`): 8 bytes little-endian header length N, N bytes of
JSON, then the data. The tensors must cover the data without holes or overlap, so alignment requires padding the header
with spaces and ordering the tensors. The safetensors library is not used: it builds headers only together with data,
and reads headers by mapping the file, which kills the process if the file shrinks meanwhile.

`Layout.plan` is pure; `Layout.read` reads and validates the files' headers without mapping anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from weights.format.errors import IntegrityError, InvalidLayout
from weights.format.names import INDEX_SUFFIX, TENSOR_SUFFIX, check_file_name, open_regular

# dtype code of safetensors 0.8 -> bits per element
DTYPE_BITS: Mapping[str, int] = {
    code: bits
    for bits, codes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E5M2FNUZ F8_E4M3FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "I64 U64 F64 C64"),
    )
    for code in codes.split()
}
LENGTH_BYTES = 8
ALIGN_BYTES = 64  # size of a cache line, and the best alignment for AVX-512 and cudaMemcpyAsync
MAX_HEADER_BYTES = 100_000_000  # the safetensors library has the same limit
MAX_INDEX_BYTES = 64 << 20
DEFAULT_MAX_FILE_BYTES = 5_000_000_000  # transformers' default shard size
MAX_RANK = 32  # limits the time to multiply dimensions: a million take minutes
METADATA_KEY = "__metadata__"
_FORBIDDEN = re.compile(r"[\x00-\x1f\ud800-\udfff]")


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_ENTRIES, _ENTRY = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `dtype` is a safetensors code ("BF16", "F32", ...), `shape` in elements.

    Raises InvalidLayout if the safetensors format does not allow the name, dtype or shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.name, str) or self.name in ("", METADATA_KEY) or _FORBIDDEN.search(self.name):
            raise InvalidLayout(f"{self.name!r} is not a valid tensor name: empty, {METADATA_KEY!r} or not plain text")
        if self.dtype not in DTYPE_BITS:
            raise InvalidLayout(f"tensor {self.name!r}: unknown dtype {str(self.dtype)[:40]!r}")
        if len(self.shape) > MAX_RANK or not all(0 <= dim < 2**63 for dim in self.shape):
            raise InvalidLayout(f"tensor {self.name!r}: {str(self.shape)[:80]} is not a valid shape")
        if self.numel * DTYPE_BITS[self.dtype] % 8:
            raise InvalidLayout(f"tensor {self.name!r}: {self.dtype} of {self.shape} does not end on a byte boundary")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Placed:
    """A tensor and its absolute byte range [start, end) inside `file`."""

    spec: TensorSpec
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file. header: its exact first bytes (length prefix, JSON, padding). tensors: in file order."""

    name: str
    header: bytes = field(repr=False)
    tensors: tuple[Placed, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.tensors[-1].end if self.tensors else len(self.header)

    @classmethod
    def of(cls, name: str, specs: Sequence[TensorSpec]) -> FileLayout:
        """Lay out a file with these tensors in this order, so that the data are aligned in a page-aligned mapping."""
        body: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}  # transformers requires this metadata
        for placed in _placed(name, specs, 0):
            spec, offsets = placed.spec, [placed.start, placed.end]
            body[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        padded = -(-(LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - LENGTH_BYTES
        if padded > MAX_HEADER_BYTES:
            raise InvalidLayout(f"{len(specs)} tensors need a header of {padded} bytes; at most {MAX_HEADER_BYTES}")
        header = struct.pack("<Q", padded) + text.ljust(padded, b" ")
        return cls(name, header, _placed(name, specs, len(header)))

    @classmethod
    def read(cls, file: BinaryIO, *, path: object, name: str) -> FileLayout:
        """Read the layout of the open safetensors file `name` from its header only.

        Raises IntegrityError for anything that the format forbids: unknown dtypes, shapes that are not lists of
        non-negative integers, offsets that overlap, leave holes, do not match the shape, or do not end at the end of
        the file.
        """
        file_bytes = os.fstat(file.fileno()).st_size
        try:
            prefix = file.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < LENGTH_BYTES or length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
                raise ValueError(f"announces a header of {length} bytes in a file of {file_bytes} bytes")
            layout = cls(name, header := prefix + file.read(length), _parsed(name, header))
            if layout.nbytes != file_bytes:
                raise ValueError(f"tensors end at byte {layout.nbytes}, but the file has {file_bytes} bytes")
        except ValueError as error:
            raise IntegrityError(str(error), path=path, file=name) from error
        return layout


def _placed(file: str, specs: Iterable[TensorSpec], position: int) -> tuple[Placed, ...]:
    """Place these tensors one after another, the first at byte `position`."""
    tensors = []
    for spec in specs:
        tensors.append(Placed(spec, file, position, position + spec.nbytes))
        position += spec.nbytes
    return tuple(tensors)


def _parsed(file: str, header: bytes) -> tuple[Placed, ...]:
    """Parse the tensors in a header. Raises ValueError."""
    text = header[LENGTH_BYTES:].decode()
    if not text.startswith("{"):
        raise ValueError("the header does not begin with '{'")
    try:
        entries = _ENTRIES.decode(text)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    _METADATA.decode(entries.pop(METADATA_KEY, b"{}"))
    read = sorted(((name, _ENTRY.decode(raw)) for name, raw in entries.items()), key=lambda item: item[1].data_offsets)
    tensors = _placed(file, [TensorSpec(name, entry.dtype, entry.shape) for name, entry in read], len(header))
    for (name, entry), placed in zip(read, tensors, strict=True):
        if entry.data_offsets != (placed.start - len(header), placed.end - len(header)):
            raise ValueError(
                f"tensor {name!r} has data_offsets {entry.data_offsets}, which overlap, leave a hole or do not span "
                f"the {placed.nbytes} bytes of its shape"
            )
    return tensors


@dataclass(frozen=True)
class Layout:
    """The files of one version. Each tensor name occurs once over all files."""

    files: tuple[FileLayout, ...]

    @cached_property
    def _by_name(self) -> dict[str, Placed]:
        return {placed.spec.name: placed for file in self.files for placed in file.tensors}

    @property
    def nbytes(self) -> int:
        """The size of all safetensors files in bytes, headers included."""
        return sum(file.nbytes for file in self.files)

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._by_name.values())

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def find(self, name: str) -> Placed:
        """Return the place of tensor `name`. Raises InvalidLayout."""
        try:
            return self._by_name[name]
        except KeyError:
            raise InvalidLayout(f"no tensor named {name!r} in the layout") from None

    def file(self, name: str) -> FileLayout:
        """Return the layout of the file `name`, which must exist."""
        return next(file for file in self.files if file.name == name)

    def index_file(self) -> tuple[str, bytes] | None:
        """Return the name and the bytes of transformers' index over several files; None for a single file."""
        if len(self.files) == 1:
            return None
        stem, numbered, _ = self.files[0].name.partition("-00001-of-")
        if not numbered:
            stem = "model"
        body = {
            "metadata": {"total_size": sum(placed.nbytes for placed in self)},
            "weight_map": {placed.spec.name: placed.file for placed in self},
        }
        return stem + INDEX_SUFFIX, json.dumps(body, indent=1).encode()

    @classmethod
    def plan(
        cls, specs: Iterable[TensorSpec], *, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES, stem: str = "model"
    ) -> Layout:
        """Lay out `specs` in files of at most `max_file_bytes` of tensor data, or of one larger tensor. Pure.

        The format forbids holes, so a tensor starts aligned only if all before it have aligned sizes: within a file
        tensors are sorted by the largest power of two that divides their size, then in the order of `specs`. Tensors
        whose size is a multiple of ALIGN_BYTES (nearly all tensors of a real model) start on such a boundary; other
        tensors start at least on a multiple of their element size.

        `stem` names the files ("model", or "adapter_model" for LoRA). Raises InvalidLayout.
        """
        specs = tuple(specs)
        if len({spec.name for spec in specs}) != len(specs) or not specs:
            raise InvalidLayout("a version needs at least one tensor, and unique tensor names")
        groups: list[list[TensorSpec]] = [[]]
        filled = 0
        for spec in specs:
            if groups[-1] and filled + spec.nbytes > max_file_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(spec)
            filled += spec.nbytes
        names = [f"{stem}-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
        if len(groups) == 1:
            names = [stem]
        for group in groups:
            group.sort(key=lambda spec: min(spec.nbytes & -spec.nbytes, ALIGN_BYTES) or ALIGN_BYTES, reverse=True)
        files = zip(names, groups, strict=True)
        return cls(tuple(FileLayout.of(name + TENSOR_SUFFIX, group) for name, group in files))

    @classmethod
    def read(cls, directory: Path | str) -> Layout:
        """Read and validate the layout of a checkpoint directory.

        The files are those in `*.safetensors.index.json`, else `model.safetensors`, else all
        `*.safetensors`. Raises IntegrityError (a bad header, a symlink, an index that disagrees with the files) or
        InvalidLayout (no safetensors file at all).
        """
        directory = Path(directory)
        names, weight_map = _files_of(directory)
        files = []
        owner: dict[str, str] = {}
        for file in names:
            with open_regular(directory, file) as opened:
                files.append(FileLayout.read(opened, path=directory, name=file))
            for placed in files[-1].tensors:
                if (other := owner.setdefault(placed.spec.name, file)) != file:
                    raise IntegrityError(f"{placed.spec.name} is also in {other}", path=directory, file=file)
        if weight_map is not None and weight_map != owner:
            differing = min(set(weight_map.items()) ^ set(owner.items()))[0]
            raise IntegrityError(f"the index and the files disagree about {differing}", path=directory)
        return cls(tuple(files))


def _files_of(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    try:
        present = sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise InvalidLayout(f"{directory} cannot be read as a checkpoint directory: {error.strerror}") from error
    indexes = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in indexes:
        indexes = ["model" + INDEX_SUFFIX]
    if len(indexes) > 1:
        raise InvalidLayout(f"{directory} has several indexes ({', '.join(indexes)}); keep only the valid index")
    if indexes:
        weight_map = read_index(directory, indexes[0])
        return sorted(set(weight_map.values())), weight_map
    names = [name for name in present if name.endswith(TENSOR_SUFFIX)]
    if "model" + TENSOR_SUFFIX in names:
        names = ["model" + TENSOR_SUFFIX]
    if not names:
        raise InvalidLayout(f"{directory} has no *.safetensors file; convert other weight formats to safetensors first")
    return names, None


def read_index(directory: Path, name: str) -> dict[str, str]:
    """Return the file of each tensor according to the index file `name`. Raises IntegrityError."""
    with open_regular(directory, name) as fd:
        raw = fd.read(MAX_INDEX_BYTES + 1)
    try:
        if len(raw) > MAX_INDEX_BYTES:
            raise ValueError(f"larger than {MAX_INDEX_BYTES} bytes")
        pairs = msgspec.json.decode(raw, type=_Index).weight_map
        if not pairs or not all(check_file_name(file).endswith(TENSOR_SUFFIX) for file in pairs.values()):
            raise ValueError("expected only names of *.safetensors files")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"not a usable index: {error}", path=directory, file=name) from error
    return pairs


def rename_tensors(directory: Path, names: Mapping[str, str]) -> None:
    """Rename tensors of the checkpoint in `directory`, in file headers and index. The data do not change."""
    for file in Layout.read(directory).files:
        if any(placed.spec.name in names for placed in file.tensors):
            _rewrite(directory / file.name, file, names)
    for index in directory.glob(f"*{INDEX_SUFFIX}"):
        body = json.loads(index.read_bytes())
        body["weight_map"] = {names.get(name, name): file for name, file in body["weight_map"].items()}
        index.write_text(json.dumps(body, indent=1))


def _rewrite(path: Path, layout: FileLayout, names: Mapping[str, str]) -> None:
    renamed = path.with_name(path.name + ".renamed")
    specs = [replace(placed.spec, name=names.get(placed.spec.name, placed.spec.name)) for placed in layout.tensors]
    with path.open("rb") as old, os.fdopen(os.open(renamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
        new.write(FileLayout.of(layout.name, specs).header)
        old.seek(len(layout.header))
        shutil.copyfileobj(old, new, 32 << 20)
    os.replace(renamed, path)
