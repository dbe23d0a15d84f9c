"""Adam moments of a snapshot's file as 8-bit blocks: 256 elements share a float32 scale, and each becomes one byte.

Lossy; used only where a person asks for it. Pure functions of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weights.format.errors import ObjectDamaged
from weights.format.layout import Layout

BLOCK = 256
FIRST, SECOND = "exp_avg.", "exp_avg_sq."
Range = tuple[int, int, str]
"""Where bytes stand in a file, and the moment that they belong to: FIRST, SECOND, or "" for exact ones."""


def ranges_of(layout: Layout) -> dict[str, list[Range]]:
    """The moments of each file that has some, in order."""
    found: dict[str, list[Range]] = {}
    for placed in sorted(layout, key=lambda placed: placed.start):
        kind = next((kind for kind in (FIRST, SECOND) if placed.spec.name.startswith(kind)), None)
        if kind is not None and placed.spec.dtype == "F32":
            found.setdefault(placed.file, []).append((placed.start, placed.end, kind))
    return found


def parts(ranges: Iterable[Range], start: int, end: int) -> Iterator[tuple[int, str]]:
    """(bytes, moment) of each part of the bytes [start, end) of a file, in order."""
    for first, last, kind in ranges:
        first, last = max(start, first), min(end, last)
        if first < last:
            yield first - start, ""
            yield last - first, kind
            start = last
    yield end - start, ""


def encode(data: bytes, ranges: Iterable[Range], start: int) -> bytes:
    """The bytes of a file from `start` on, with moments in blocks.

    First moment: 255 equal steps between -max and max of its block, to the nearest. Second moment: 255 steps of its
    square root, rounded up, so that Adam's divisor never shrinks and no element takes a larger step than exactly.
    """
    encoded, at = bytearray(), 0
    for nbytes, kind in parts(ranges, start, start + len(data)):
        part, at = data[at : at + nbytes], at + nbytes
        encoded += _blocks(np.frombuffer(part, np.float32), kind) if kind else part
    return bytes(encoded)


def decode(data: bytes, ranges: Iterable[Range], start: int, nbytes: int) -> bytes:
    """An approximation of the `nbytes` bytes that `encode` got. Raises ObjectDamaged."""
    decoded, at = bytearray(), 0
    for size, kind in parts(ranges, start, start + nbytes):
        stored = -(-size // (4 * BLOCK)) * 4 + size // 4 if kind else size
        part, at = data[at : at + stored], at + stored
        if len(part) != stored:
            raise ObjectDamaged("it is too short", path=kind)
        decoded += _values(part, size // 4, kind).tobytes() if kind else part
    return bytes(decoded)


def _blocks(values: np.ndarray, kind: str) -> bytes:
    padded = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    padded.reshape(-1)[: values.size] = np.sqrt(values) if kind == SECOND else values
    scales = (np.abs(padded).max(axis=1) / np.float32(255 if kind == SECOND else 127)).astype(np.float32)
    ratio = padded / np.where(scales > 0, scales, 1)[:, None]
    codes = np.ceil(ratio).clip(0, 255).astype(np.uint8) if kind == SECOND else np.rint(ratio).astype(np.int8)
    return scales.tobytes() + codes.reshape(-1)[: values.size].tobytes()


def _values(blocks: bytes, size: int, kind: str) -> np.ndarray:
    count = -(-size // BLOCK)
    scales = np.frombuffer(blocks, np.float32, count)
    codes = np.frombuffer(blocks, np.uint8 if kind == SECOND else np.int8, size, 4 * count)
    values = codes.astype(np.float32) * np.repeat(scales, BLOCK)[:size]
    return values * values if kind == SECOND else values
