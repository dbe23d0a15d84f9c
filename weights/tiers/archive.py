"""A version's files as a tar file that is stored nowhere: any range of it is read, and it is unpacked and compared."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

from weights.format.errors import IntegrityError
from weights.format.manifest import Manifest, checksum, hashed
from weights.format.names import MANIFEST_FILE

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Archive:
    """`parts`: of the tar file in order, headers and padding as bytes, files as (path, size). `tag`: the same for as
    long as the bytes are. `lease`: keeps the files in shared memory while the archive is read."""

    parts: tuple[bytes | tuple[Path, int], ...]
    tag: str
    lease: object = None

    @property
    def nbytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part[1] for part in self.parts)

    @classmethod
    def of(cls, folder: Path, lease: object = None) -> Archive:
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


def unpack(
    parts: Iterable[bytes], folder: Path, moved: Callable[[int, int], object] = lambda done, total: None
) -> None:
    """Write the files of an archive, which comes in `parts`, into the new directory `folder`, without the manifest.

    `moved` gets the bytes received and those of all files. Raises IntegrityError for a file that the manifest
    does not have or that differs from its checksum, and for an archive that ends early.
    """
    folder.mkdir()
    parts, received = iter(parts), 0
    manifest: Manifest | None = None

    def read(_size: int) -> bytes:
        nonlocal received
        received += len(part := next(parts, b""))
        return part

    try:
        with tarfile.open(fileobj=cast(IO[bytes], SimpleNamespace(read=read)), mode="r|") as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                if content is None or (manifest is None) != (entry.name == MANIFEST_FILE):
                    raise IntegrityError("is not expected here", path="the archive", file=entry.name)
                if manifest is None:
                    manifest = Manifest.from_bytes(content.read(), path="the archive")
                    continue
                if entry.name not in manifest.files:
                    raise IntegrityError("is not in the manifest", path="the archive", file=entry.name)
                expected = manifest.files[entry.name].checksum
                chunks = iter(lambda content=content: content.read(CHUNK_BYTES), b"")
                with open(folder / entry.name, "xb") as out:
                    for chunk in hashed(chunks, expected, {}, path="the archive", file=entry.name):
                        out.write(chunk)
                        moved(received, manifest.nbytes)
    except tarfile.TarError as error:
        raise IntegrityError(f"is not a whole tar file: {error}", path="the archive") from error
    if manifest is None or {path.name for path in folder.iterdir()} != set(manifest.files):
        raise IntegrityError("ended early", path="the archive")
