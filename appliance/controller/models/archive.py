"""A version's files as a tar file, which is stored nowhere: any range of its bytes can be sent."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi.responses import StreamingResponse

from appliance.controller.interfaces.errors import ApiError
from weights.format.checksums import checksum
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE
from weights.memory.lease import Lease

CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True)
class Archive:
    """`parts`: of the tar file in order, headers and padding as bytes, files as (path, size). `tag`: the same for as
    long as the bytes are. `lease`: keeps the files in shared memory."""

    parts: tuple[bytes | tuple[Path, int], ...]
    tag: str
    lease: Lease | None = None

    @property
    def nbytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part[1] for part in self.parts)

    @classmethod
    def of(cls, folder: Path, lease: Lease | None = None) -> Archive:
        """The archive of the version directory `folder`, its manifest with the checksums included. Raises
        IntegrityError."""
        manifest, parts = Manifest.read(folder), []
        own_bytes = (folder / MANIFEST_FILE).read_bytes()
        sizes = {name: record.nbytes for name, record in sorted(manifest.files.items())}
        for name, size in {MANIFEST_FILE: len(own_bytes), **sizes}.items():
            header = tarfile.TarInfo(name)
            header.size, header.mtime = size, int(manifest.created_s)
            parts += [header.tobuf(tarfile.GNU_FORMAT), (folder / name, size), bytes(-size % tarfile.BLOCKSIZE)]
        return cls((*parts, bytes(2 * tarfile.BLOCKSIZE)), checksum(own_bytes).replace(":", "-"), lease)

    def chunks(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes [start, end)."""
        at = 0
        for part in self.parts:
            size = len(part) if isinstance(part, bytes) else part[1]
            first, last, at = max(0, start - at), min(size, end - at), at + size
            if first >= last:
                continue
            if isinstance(part, bytes):
                yield part[first:last]
                continue
            with open(part[0], "rb", buffering=0) as file:
                file.seek(first)
                while first < last and (data := file.read(min(CHUNK_BYTES, last - first))):
                    first += len(data)
                    yield data
            if first < last:
                raise OSError(f"{part[0]} is shorter than its manifest says")


def answer(archive: Archive, name: str, asked_range: str | None, if_range: str | None) -> StreamingResponse:
    """The whole archive, or the part that a Range header names (RFC 9110, 14.2). Raises ApiError 416."""
    total, tag = archive.nbytes, f'"{archive.tag}"'
    start, end, status = 0, total, 200
    headers = {"etag": tag, "accept-ranges": "bytes", "x-content-type-options": "nosniff"}
    headers["content-disposition"] = f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "-", name)}.tar"'
    if (match := _RANGE.fullmatch(asked_range or "")) and if_range in (None, tag):
        start, end = int(match[1]), min(total, int(match[2]) + 1 if match[2] else total)
        if start >= end:
            message = f"The archive has {total} bytes and none at {asked_range}."
            raise ApiError(416, message, code="range_not_satisfiable", param="range")
        status, headers["content-range"] = 206, f"bytes {start}-{end - 1}/{total}"
    headers["content-length"] = str(end - start)
    return StreamingResponse(archive.chunks(start, end), status, headers, media_type="application/x-tar")
