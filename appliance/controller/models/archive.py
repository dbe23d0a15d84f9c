"""Answers with a version's files as a tar file that is stored nowhere, whole or the part that a Range header names."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from appliance.controller.interfaces.errors import ApiError
from weights.format.manifest import Manifest, checksum
from weights.format.names import MANIFEST_FILE

_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
Part = bytes | tuple[Path, int]
"""A part of the tar file: a header or padding, or a file with its size."""


def answer(
    folder: Path, name: str, range_header: str | None, if_range: str | None, done: BackgroundTask | None
) -> StreamingResponse:
    """Answer with the archive of a version directory, its manifest first, or with a part of it (RFC 9110, 14.2).

    range_header: an unknown form means the whole. done: runs after the last byte, or when the client leaves. Raises
    ApiError 416, IntegrityError, OSError.
    """
    manifest, parts = Manifest.read(folder), list[Part]()
    own_bytes = (folder / MANIFEST_FILE).read_bytes()
    sizes = {file: record.nbytes for file, record in sorted(manifest.files.items())}
    for file, size in {MANIFEST_FILE: len(own_bytes), **sizes}.items():
        header = tarfile.TarInfo(file)
        header.size, header.mtime = size, int(manifest.created_s)
        parts += [header.tobuf(tarfile.GNU_FORMAT), (folder / file, size), bytes(-size % tarfile.BLOCKSIZE)]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    total, tag = sum(map(_size, parts)), f'"{checksum(own_bytes).replace(":", "-")}"'
    start, end, status = 0, total, 200
    headers = {"etag": tag, "accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    headers["content-disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "-", name)}.tar"'
    if (match := _RANGE.fullmatch(range_header or "")) and if_range in (None, tag):
        start, end = int(match[1]), min(total, int(match[2]) + 1 if match[2] else total)
        if start >= end:
            message = f"The archive has {total} bytes and none at {range_header}."
            raise ApiError(416, message, code="range_not_satisfiable", param="range")
        status, headers["content-range"] = 206, f"bytes {start}-{end - 1}/{total}"
    headers["content-length"] = str(end - start)
    return StreamingResponse(_read(parts, start, end), status, headers, "application/x-tar", done)


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[1]


def _read(parts: Sequence[Part], start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end)."""
    at = 0
    for part in parts:
        first, last, at = max(0, start - at), min(_size(part), end - at), at + _size(part)
        if first >= last:
            continue
        if isinstance(part, bytes):
            yield part[first:last]
            continue
        with open(part[0], "rb", buffering=0) as file:
            file.seek(first)
            while first < last and (data := file.read(min(_CHUNK_BYTES, last - first))):
                first += len(data)
                yield data
        if first < last:
            raise OSError(f"{part[0]} is shorter than its manifest says")
