"""Builds aligned safetensors headers and validates untrusted ones.

Format (safetensors README and its Rust `SafeTensors::deserialize`): 8 bytes little-endian header length N, N bytes of
JSON, then the data. The tensors must cover the data without holes or overlap, so alignment requires padding the header
with spaces and ordering the tensors. The library itself builds headers only with their data, and reads them by mapping
the file, which kills the process when a file shrinks meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO

from weights.format import foreign_json
from weights.format.errors import IntegrityError, InvalidLayout

# Bits per element of the dtype codes of safetensors 0.8.
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
ALIGN_BYTES = 64  # a cache line, and the best alignment for AVX-512 and cudaMemcpyAsync
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_HEADER_VALUES = 1 << 22
"""Some ten for a tensor; those of the largest models have a hundred thousand over all their files."""
MAX_RANK = 32
METADATA_KEY = "__metadata__"
_FORBIDDEN = re.compile(r"[\x00-\x1f\ud800-\udfff]")


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
            raise InvalidLayout(f"{self.name!r} is not a tensor's name: empty, {METADATA_KEY!r} or not plain text")
        if self.dtype not in DTYPE_BITS:
            raise InvalidLayout(f"tensor {self.name!r}: unknown dtype {str(self.dtype)[:40]!r}")
        # bool is an int in Python: [true, 8] would otherwise pass as [1, 8].
        if len(self.shape) > MAX_RANK or any(type(dim) is not int or not 0 <= dim < 2**63 for dim in self.shape):
            raise InvalidLayout(f"tensor {self.name!r}: {str(self.shape)[:80]} is not a shape")
        if self.numel * DTYPE_BITS[self.dtype] % 8:
            raise InvalidLayout(f"tensor {self.name!r}: {self.dtype} of {self.shape} does not end on a byte boundary")

    @property
    def numel(self) -> int:
        """Number of elements."""
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
    """One safetensors file: `header` is its exact first bytes (length prefix, JSON, padding), `tensors` are in file
    order."""

    name: str
    header: bytes = field(repr=False)
    tensors: tuple[Placed, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.tensors[-1].end if self.tensors else len(self.header)

    @classmethod
    def of(cls, name: str, specs: Sequence[TensorSpec]) -> FileLayout:
        """A file of these tensors, in this order, whose data starts aligned in a page-aligned mapping."""
        body: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}  # transformers insists on it
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
        """The layout of the opened safetensors file `name`, from its header alone.

        Raises IntegrityError for everything the format forbids: unknown dtypes, shapes that are not lists of
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
                raise ValueError(f"tensors end at byte {layout.nbytes}, the file has {file_bytes} (cut or extended)")
        except ValueError as error:
            raise IntegrityError(str(error), path=path, file=name) from error
        return layout


def _placed(file: str, specs: Iterable[TensorSpec], position: int) -> tuple[Placed, ...]:
    """These tensors one after another, from `position` on."""
    tensors = []
    for spec in specs:
        tensors.append(Placed(spec, file, position, position + spec.nbytes))
        position += spec.nbytes
    return tuple(tensors)


def _parsed(file: str, header: bytes) -> tuple[Placed, ...]:
    """The tensors of a whole header. Raises ValueError."""
    if not header.startswith(b"{", LENGTH_BYTES):
        raise ValueError("the header does not begin with '{'")
    try:
        body: dict[str, Any] = foreign_json.loads(header[LENGTH_BYTES:], most_values=MAX_HEADER_VALUES, most_depth=None)
        body.pop(METADATA_KEY, None)
        entries = sorted(body.items(), key=lambda item: item[1]["data_offsets"])
        specs = [TensorSpec(name, entry["dtype"], entry["shape"]) for name, entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed: {type(error).__name__} {str(error)[:120]}") from error
    tensors = _placed(file, specs, len(header))
    for (name, entry), placed in zip(entries, tensors, strict=True):
        offsets = entry["data_offsets"]
        # A bool or a float equals an integer in Python, and the library refuses it.
        if offsets != [placed.start - len(header), placed.end - len(header)] or {*map(type, offsets)} != {int}:
            raise ValueError(
                f"tensor {name!r} has data_offsets {str(offsets)[:80]}, which overlap, leave a hole or do not span the "
                f"{placed.nbytes} bytes of its shape"
            )
    return tensors
