"""Computes BLAKE3 checksums of tensor bytes, written as "blake3:<64 hex digits>".

BLAKE3 runs at about 4.5 GB/s per core with AVX-512 (zlib.crc32: 4 GB/s), releases the GIL, and unlike a CRC
does not collide by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3

from weights.format.errors import ChecksumMismatch
from weights.format.layout import Layout


def checksum(data: bytes | memoryview) -> str:
    return checksum_of((data,))


def checksum_of(chunks: Iterable[bytes | memoryview]) -> str:
    """The checksum of the chunks end to end."""
    running = Running()
    for chunk in chunks:
        running.update(chunk)
    return running.text()


class Running:
    """A checksum of chunks that come one by one."""

    def __init__(self) -> None:
        self._digest = blake3()

    def update(self, chunk: bytes | memoryview) -> None:
        self._digest.update(chunk)

    def text(self) -> str:
        return f"blake3:{self._digest.hexdigest()}"


def compare(found: Mapping[str, str], expected: Mapping[str, str | None], layout: Layout, *, path: object) -> None:
    """Raises ChecksumMismatch naming the first tensor whose expected checksum is known and differs."""
    for name, text in expected.items():
        if text is not None and found[name] != text:
            raise ChecksumMismatch(
                f"expected {text}, the bytes give {found[name]}",
                path=path,
                file=layout.find(name).file,
                tensor=name,
            )
