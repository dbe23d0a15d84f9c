"""Builds aligned safetensors headers and validates untrusted ones. Pure functions over bytes.

Format (safetensors README and its Rust `SafeTensors::deserialize`): 8 bytes little-endian header length N, N bytes of
JSON, then the data. The tensors must cover the data without holes or overlap, so alignment requires padding the header
with spaces and ordering the tensors. The library itself builds headers only with their data, and reads them by mapping
the file, which kills the process when a file shrinks meanwhile.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from weights.format import foreign_json
from weights.format.errors import InvalidLayout

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


def build_header(tensors: Sequence[tuple[TensorSpec, int, int]]) -> bytes:
    """Length prefix and padded JSON for tensors given as (spec, start, end) relative to the data section, which starts
    aligned in a page-aligned mapping."""
    body: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}  # transformers insists on it
    for spec, start, end in tensors:
        body[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise InvalidLayout(f"{len(tensors)} tensors need a header of {padded} bytes; at most {MAX_HEADER_BYTES}")
    return struct.pack("<Q", padded) + text.ljust(padded, b" ")


def parse_header(raw: bytes, *, file_bytes: int) -> list[tuple[TensorSpec, int, int]]:
    """Tensors as (spec, start, end), absolute in the file and in file order, from a complete header.

    Raises ValueError for everything the format forbids: unknown dtypes, shapes that are not lists of non-negative
    integers, offsets that overlap, leave holes, do not match the shape, or do not end at the end of the file.
    """
    if not raw.startswith(b"{", LENGTH_BYTES):
        raise ValueError("the header does not begin with '{'")
    try:
        body: dict[str, Any] = foreign_json.loads(raw[LENGTH_BYTES:], most_values=MAX_HEADER_VALUES, most_depth=None)
        body.pop(METADATA_KEY, None)
        found = [
            (entry["data_offsets"], TensorSpec(name, entry["dtype"], entry["shape"])) for name, entry in body.items()
        ]
        found.sort(key=lambda item: item[0])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed: {type(error).__name__} {str(error)[:120]}") from error
    tensors, position = [], len(raw)
    for offsets, spec in found:
        start, position = position, position + spec.nbytes
        # A bool or a float equals an integer in Python, and the library refuses it.
        if offsets != [start - len(raw), position - len(raw)] or any(type(offset) is not int for offset in offsets):
            raise ValueError(
                f"tensor {spec.name!r} has data_offsets {str(offsets)[:80]}, which overlap, leave a hole "
                f"or do not span the {spec.nbytes} bytes of its shape"
            )
        tensors.append((spec, start, position))
    if position != file_bytes:
        raise ValueError(f"tensors end at byte {position}, the file has {file_bytes} (truncated or extended)")
    return tensors
