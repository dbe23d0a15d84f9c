"""Adam moments as 8-bit blocks: 256 elements share a float32 scale, each becomes one byte, zstd shrinks the rest.

Lossy; used only where a person asks for it. Pure functions of bytes.
"""

from __future__ import annotations

import numpy as np
import zstandard

from weights.format.errors import ObjectDamaged

BLOCK = 256


def is_moment(name: str, dtype: str) -> bool:
    return dtype == "F32" and name.startswith(("exp_avg.", "exp_avg_sq."))


def encode(data: bytes, name: str) -> bytes:
    """The block form of `data`, float32 elements of the moment `name`.

    First moment: 255 equal steps between -max and max of its block, to the nearest. Second moment: 255 steps of its
    square root, rounded up, so that Adam's divisor never shrinks and no element takes a larger step than exactly.
    """
    values, is_second = np.frombuffer(data, np.float32), _is_second(name)
    padded = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    padded.reshape(-1)[: values.size] = np.sqrt(values) if is_second else values
    scales = (np.abs(padded).max(axis=1) / np.float32(255 if is_second else 127)).astype(np.float32)
    ratio = padded / np.where(scales > 0, scales, 1)[:, None]
    codes = np.ceil(ratio).clip(0, 255).astype(np.uint8) if is_second else np.rint(ratio).astype(np.int8)
    return zstandard.compress(scales.tobytes() + codes.reshape(-1)[: values.size].tobytes(), 1)


def decode(blob: bytes, name: str, nbytes: int) -> memoryview:
    """An approximation of the `nbytes` bytes passed to `encode`. Raises ObjectDamaged."""
    size, blocks = nbytes // 4, -(-(nbytes // 4) // BLOCK)
    try:
        raw = zstandard.decompress(blob, 4 * blocks + size)
        scales = np.frombuffer(raw, np.float32, blocks)
        codes = np.frombuffer(raw, np.uint8 if _is_second(name) else np.int8, size, 4 * blocks)
    except (ValueError, zstandard.ZstdError) as error:
        raise ObjectDamaged(f"it cannot be decoded: {error}", path=name) from error
    values = codes.astype(np.float32) * np.repeat(scales, BLOCK)[:size]
    return memoryview(values * values if _is_second(name) else values).cast("B")


def _is_second(name: str) -> bool:
    return name.startswith("exp_avg_sq.")
