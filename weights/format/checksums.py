"""Computes BLAKE3 checksums of files, written as "blake3:<64 hex digits>".

BLAKE3 runs at about 4.5 GB/s per core with AVX-512 (zlib.crc32: 4 GB/s), releases the GIL, and unlike a CRC
does not collide by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blake3 import blake3

from weights.format.errors import ChecksumMismatch


def checksum(data: bytes | memoryview) -> str:
    return _text(blake3(data))


def hashed(
    chunks: Iterable[bytes], expected: str | None, found: dict[str, str], *, path: object, file: str
) -> Iterator[bytes]:
    """Passes on the chunks of a file, and then puts their checksum into `found`, by the file's name. Raises
    ChecksumMismatch after the last one if it is not `expected`; None: it is not known."""
    running = blake3()
    for chunk in chunks:
        running.update(chunk)
        yield chunk
    found[file] = _text(running)
    if expected not in (None, found[file]):
        raise ChecksumMismatch(f"expected {expected}, the bytes give {found[file]}", path=path, file=file)


def _text(digest: blake3) -> str:
    return f"blake3:{digest.hexdigest()}"
