"""Stores Adam's moments in 8 bits: blocks of 256 elements share a float32 scale, and each element takes one byte.

Lossy. Pure functions of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weights.format.errors import ObjectDamaged
from weights.format.layout import Layout

BLOCK = 256
FIRST, SECOND = "exp_avg", "exp_avg_sq"
Range = tuple[int, int, str]
"""The bytes [start, end) of a file, and the name of their moment."""


def ranges_of(layout: Layout) -> dict[str, list[Range]]:
    """Return the byte ranges of moments by file, in ascending order."""
    ranges: dict[str, list[Range]] = {}
    for placed in layout:
        moment = placed.spec.name.partition(".")[0]
        if moment in (FIRST, SECOND) and placed.spec.dtype == "F32":
            ranges.setdefault(placed.file, []).append((placed.start, placed.end, moment))
    return ranges


def encode(data: bytes, ranges: Iterable[Range], start: int) -> bytes:
    """Encode the bytes of a file from offset `start` on, with moments as blocks.

    First moment: 254 equal steps between the block's -max and max, rounded to nearest. Second moment: its square root
    in 255 steps, rounded up, so that Adam's divisor never shrinks and no element's update grows.
    """
    encoded, at = bytearray(), 0
    for nbytes, moment in _parts(ranges, start, start + len(data)):
        part, at = data[at : at + nbytes], at + nbytes
        encoded += _blocks(np.frombuffer(part, np.float32), moment) if moment else part
    return bytes(encoded)


def decode(data: bytes, ranges: Iterable[Range], start: int, nbytes: int) -> bytes:
    """Restore the `nbytes` input bytes of `encode` approximately. Raises ObjectDamaged."""
    decoded, at = bytearray(), 0
    for size, moment in _parts(ranges, start, start + nbytes):
        blocks, count = -(-size // (4 * BLOCK)), size // 4
        part, at = data[at : at + (stored := 4 * blocks + count if moment else size)], at + stored
        if len(part) != stored:
            raise ObjectDamaged("the encoded moments are too short", path=moment)
        if moment:
            codes = np.frombuffer(part, np.uint8 if moment == SECOND else np.int8, count, 4 * blocks)
            values = codes * np.repeat(np.frombuffer(part, np.float32, blocks), BLOCK)[:count]
            part = (values * values if moment == SECOND else values).tobytes()
        decoded += part
    return bytes(decoded)


def _parts(ranges: Iterable[Range], start: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield consecutive parts of the bytes [start, end) of a file as (size, moment), with moment "" for other bytes."""
    for first, last, moment in ranges:
        first, last = max(start, first), min(end, last)
        if first < last:
            yield first - start, ""
            yield last - first, moment
            start = last
    yield end - start, ""


def _blocks(values: np.ndarray, moment: str) -> bytes:
    """Encode elements as the scales of all blocks, then the codes of all elements."""
    padded = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    padded.flat[: values.size] = np.sqrt(values) if moment == SECOND else values
    scales = np.abs(padded).max(axis=1) / np.float32(255 if moment == SECOND else 127)
    ratio = padded / np.where(scales > 0, scales, 1)[:, None]
    codes = np.ceil(ratio).clip(0, 255).astype(np.uint8) if moment == SECOND else np.rint(ratio).astype(np.int8)
    return scales.tobytes() + codes.reshape(-1)[: values.size].tobytes()
