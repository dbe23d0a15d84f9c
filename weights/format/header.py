"""Builds aligned safetensors headers and validates untrusted ones. Pure functions over bytes.

Format (safetensors README and its Rust `SafeTensors::deserialize`): 8 bytes little-endian header length N,
N bytes of JSON beginning with "{", then the data. The tensors must cover the data without holes or overlap,
so alignment requires padding the header with spaces and ordering the tensors.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weights.format import foreign_json
from weights.format.errors import HeaderInvalid, InvalidLayout

# Bits per element of the dtype codes of safetensors 0.8.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_HEADER_VALUES = 1 << 22
"""Some ten for a tensor; those of the largest models have a hundred thousand over all their files."""
MAX_RANK = 32
MAX_NAME_BYTES = 1024
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
        reason = spec_fault(self.name, self.dtype, self.shape)
        if reason is not None:
            raise InvalidLayout(f"tensor {self.name!r}: {reason}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return count_elements(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


def count_elements(shape: Sequence[int]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def spec_fault(name: Any, dtype: Any, shape: Any) -> str | None:
    """Return why these cannot be a tensor, or None. Accepts any objects."""
    if not isinstance(name, str) or not name or name == METADATA_KEY:
        return f"the name must be a non-empty string other than {METADATA_KEY!r}"
    if _FORBIDDEN.search(name):
        return "the name holds control characters or lone surrogates"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"the name is longer than {MAX_NAME_BYTES} bytes"
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPE_BITS)}"
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_RANK:
        return f"the shape must be a list of at most {MAX_RANK} integers"
    # bool is an int in Python: [true, 8] would otherwise pass as [1, 8].
    if any(type(dim) is not int or not 0 <= dim < 2**63 for dim in shape):
        return f"every dimension must be an integer from 0 to 2^63 - 1, got {str(shape)[:80]}"
    bits = count_elements(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        return f"{dtype} with shape {tuple(shape)} does not end on a byte boundary"
    if bits // 8 >= 2**63:
        return f"shape {tuple(shape)} takes {bits // 8} bytes, more than any file can hold"
    return None


def build_header(
    tensors: Sequence[tuple[TensorSpec, int, int]], *, metadata: Mapping[str, str], align_bytes: int
) -> bytes:
    """Length prefix and padded JSON for tensors given as (spec, start, end) relative to the data section.

    The returned length is a multiple of `align_bytes` (and of 8, as the format asks), so the data section
    starts aligned in a page-aligned mapping.
    """
    body: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for spec, start, end in tensors:
        body[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    unit = max(align_bytes, 8)
    padded = -(-(LENGTH_BYTES + len(text)) // unit) * unit - LENGTH_BYTES
    if padded > MAX_HEADER_BYTES:
        raise InvalidLayout(f"{len(tensors)} tensors need a header of {padded} bytes; at most {MAX_HEADER_BYTES}")
    return struct.pack("<Q", padded) + text.ljust(padded, b" ")


def header_bytes_needed(prefix: bytes, *, path: object, file: str, file_bytes: int) -> int:
    """Total header size (length prefix included) that the first 8 bytes announce. Raises HeaderInvalid."""
    if len(prefix) < LENGTH_BYTES:
        raise HeaderInvalid(f"file of {file_bytes} bytes is too short for a header", path=path, file=file)
    (length,) = struct.unpack_from("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise HeaderInvalid(
            f"announces a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed", path=path, file=file
        )
    if length < 2 or LENGTH_BYTES + length > file_bytes:
        raise HeaderInvalid(
            f"announces a header of {length} bytes in a file of {file_bytes} bytes", path=path, file=file
        )
    return LENGTH_BYTES + length


def parse_header(raw: bytes, *, path: object, file: str, file_bytes: int) -> list[tuple[TensorSpec, int, int]]:
    """Tensors as (spec, start, end), absolute in the file and in file order, from a complete header.

    Refuses with HeaderInvalid everything the format forbids: duplicate names, unknown dtypes or fields,
    shapes that are not lists of non-negative integers, offsets that overlap, leave holes, do not match the
    shape, or do not end exactly at the end of the file.
    """

    def fault(reason: str, tensor: str | None = None) -> HeaderInvalid:
        return HeaderInvalid(reason, path=path, file=file, tensor=tensor)

    body = _load_json(raw[LENGTH_BYTES:], path, file)
    metadata = body.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(f"{METADATA_KEY} must map strings to strings")
    found: list[tuple[int, int, TensorSpec]] = []
    for name, entry in body.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise fault("an entry must have exactly dtype, shape and data_offsets", name)
        reason = spec_fault(name, entry["dtype"], entry["shape"])
        if reason is not None:
            raise fault(reason, name)
        offsets = entry["data_offsets"]
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or any(type(offset) is not int or not 0 <= offset < 2**63 for offset in offsets)
        ):
            raise fault(f"data_offsets must be two non-negative integers, got {str(offsets)[:80]}", name)
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
        if offsets[1] - offsets[0] != spec.nbytes:
            raise fault(f"data_offsets {offsets} do not span the {spec.nbytes} bytes of its shape", name)
        found.append((offsets[0], offsets[1], spec))
    found.sort(key=lambda item: item[:2])
    base = len(raw)
    position = 0
    for start, end, spec in found:
        if start != position:
            kind = "overlaps its neighbour" if start < position else "leaves a hole before it"
            raise fault(f"data at [{start}, {end}) {kind}: expected to start at {position}", spec.name)
        position = end
    if base + position != file_bytes:
        raise fault(f"tensors end at byte {base + position}, the file has {file_bytes} (truncated or extended)")
    return [(spec, base + start, base + end) for start, end, spec in found]


def _load_json(text: bytes, path: object, file: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise HeaderInvalid("the name is twice in the header", path=path, file=file, tensor=twice)
        return made

    def no_float(number: str) -> Any:
        raise HeaderInvalid(f"holds the number {number[:40]}, only integers are allowed", path=path, file=file)

    if not text.startswith(b"{"):
        raise HeaderInvalid("the header does not begin with '{'", path=path, file=file)
    try:
        body = foreign_json.loads(
            text,
            most_values=MAX_HEADER_VALUES,
            most_depth=None,
            object_pairs_hook=unique,
            parse_float=no_float,
            parse_constant=no_float,
        )
    except HeaderInvalid:
        raise
    except ValueError as error:  # malformed UTF-8 or JSON, or an integer of thousands of digits
        raise HeaderInvalid(f"the header is not valid JSON: {str(error)[:120]}", path=path, file=file) from error
    return body
