"""Encodes tensor bytes for a packed tier as byte planes, each compressed with zstd if that helps.

Neighbouring weights differ in their mantissas and share their exponents. So the codec splits an object into planes
(byte 0 of every element, byte 1, ...), and stores a plane that a sample shows to be noise uncompressed. "zstd" is
lossless; the two codecs for moments, which only the `moments` setting enables, are not.
Pure functions of bytes.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np
import zstandard

from weights.format.errors import ObjectDamaged

Codec = Literal["zstd", "moment", "second_moment"]
_CODES: tuple[Codec, ...] = ("zstd", "moment", "second_moment")
_HEAD = struct.Struct("<4sBBHQ")  # magic, codec, element width, 0, decoded bytes
_PLANE = struct.Struct("<BQ")  # compressed?, bytes that follow
_MAGIC = b"AWO1"
_SAMPLE_BYTES = 1 << 16
_WORTH_IT = 0.97
MAX_OBJECT_BYTES = 1 << 30
BLOCK = 256
"""Elements that share one scale in a quantised moment."""


def encode(data: bytes | bytearray, *, codec: Codec, width: int = 1) -> bytes:
    """Encode `data` as a self-describing object. `width`: bytes of one element (1 to 8).

    The same arguments give the same bytes, so that an object's name can be their checksum. The moment codecs take
    float32; a block of 256 elements shares one float32 scale and each element becomes one byte.
    """
    head = _HEAD.pack(_MAGIC, _CODES.index(codec), width, 0, len(data))
    if codec == "zstd":
        return b"".join((head, *_pack_planes(memoryview(data), width)))
    scales, codes = _quantise(np.frombuffer(data, np.float32), second=codec == "second_moment")
    return b"".join((head, *_pack_planes(memoryview(scales.tobytes()), 4), *_pack_planes(memoryview(codes), 1)))


def decode(blob: bytes | memoryview, *, name: object) -> memoryview:
    """Return the bytes passed to `encode` (for the moment codecs: an approximation). Raises ObjectDamaged."""
    blob = memoryview(blob)
    try:
        magic, code, width, _, nbytes = _HEAD.unpack_from(blob)
        if magic != _MAGIC or code >= len(_CODES) or nbytes > MAX_OBJECT_BYTES:
            raise ObjectDamaged("it is not an object of a packed tier", path=name)
        body = blob[_HEAD.size :]
        if _CODES[code] == "zstd":
            found, left = _unpack_planes(body, width, nbytes)
        else:
            scales, left = _unpack_planes(body, 4, 4 * -(-nbytes // 4 // BLOCK))
            codes, left = _unpack_planes(left, 1, nbytes // 4)
            found = _restore(scales, codes, second=_CODES[code] == "second_moment")
        if left:
            raise ObjectDamaged(f"{len(left)} bytes follow the last plane", path=name)
    except (struct.error, ValueError, zstandard.ZstdError) as error:
        raise ObjectDamaged(f"it cannot be decoded: {error}", path=name) from error
    if len(found) != nbytes:
        raise ObjectDamaged(f"it holds {len(found)} bytes, its head says {nbytes}", path=name)
    return found


def _pack_planes(view: memoryview, width: int) -> list[bytes | memoryview]:
    whole = len(view) - len(view) % width
    planes = [memoryview(plane) for plane in _planes(view[:whole], width)]
    if whole < len(view):
        planes.append(view[whole:])
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
    packed: list[bytes | memoryview] = []
    for plane in planes:
        middle = max(0, (len(plane) - _SAMPLE_BYTES) // 2)
        sample = plane[middle : middle + _SAMPLE_BYTES]
        smaller = compressor.compress(plane) if len(compressor.compress(sample)) < _WORTH_IT * len(sample) else None
        if smaller is not None and len(smaller) < len(plane):
            packed += [_PLANE.pack(1, len(smaller)), smaller]
        else:
            packed += [_PLANE.pack(0, len(plane)), plane]
    return packed


def _planes(view: memoryview, width: int) -> list[np.ndarray]:
    if width == 1:
        return [np.frombuffer(view, np.uint8)]
    elements = np.frombuffer(view, np.uint8).reshape(len(view) // width, width)
    return [np.ascontiguousarray(elements[:, byte]) for byte in range(width)]


def _unpack_planes(body: memoryview, width: int, nbytes: int) -> tuple[memoryview, memoryview]:
    """Return `nbytes` of elements of `width` bytes, and what follows their planes."""
    whole = nbytes - nbytes % width if width else 0
    sizes = [whole // width] * width + ([nbytes - whole] if whole < nbytes else [])
    out = np.empty(nbytes, np.uint8)
    elements = out[:whole].reshape(whole // width, width) if width else out[:0].reshape(0, 1)
    decompressor, position = zstandard.ZstdDecompressor(), 0
    for index, size in enumerate(sizes):
        compressed, length = _PLANE.unpack_from(body, position)
        position += _PLANE.size
        plane: bytes | memoryview = body[position : position + length]
        position += length
        if compressed:
            # The frame's own size must agree, so that a malicious object cannot cause a larger allocation.
            if zstandard.frame_content_size(plane) != size:
                raise ValueError(f"plane {index} does not hold {size} bytes")
            plane = decompressor.decompress(plane)
        if len(plane) != size:
            raise ValueError(f"plane {index} does not hold {size} bytes")
        target = elements[:, index] if index < width else out[whole:]
        target[:] = np.frombuffer(plane, np.uint8)
    return memoryview(out), body[position:]


def _quantise(values: np.ndarray, *, second: bool) -> tuple[np.ndarray, np.ndarray]:
    """First moment: 255 equal steps between -max and max of its block, to the nearest. Second moment: 255 steps of
    its square root, rounded up, so that Adam's divisor never shrinks and no step of an element becomes larger than
    the exact one."""
    blocks = -(-values.size // BLOCK)
    padded = np.zeros(blocks * BLOCK, np.float32)
    padded[: values.size] = np.sqrt(values) if second else values
    padded = padded.reshape(blocks, BLOCK)
    steps = 255 if second else 127
    scales = (np.abs(padded).max(axis=1) / np.float32(steps)).astype(np.float32)
    ratio = padded / np.where(scales > 0, scales, 1)[:, None]
    codes = np.ceil(ratio).clip(0, 255).astype(np.uint8) if second else np.rint(ratio).astype(np.int8).view(np.uint8)
    return scales, np.ascontiguousarray(codes.reshape(-1)[: values.size])


def _restore(scales: memoryview, codes: memoryview, *, second: bool) -> memoryview:
    values = np.frombuffer(codes, np.uint8 if second else np.int8).astype(np.float32)
    values *= np.repeat(np.frombuffer(scales, np.float32), BLOCK)[: len(values)]
    return memoryview(values * values if second else values).cast("B")
