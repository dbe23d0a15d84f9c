"""Implements the tiers below shared memory: copies of versions, adapters and snapshots on disk and in one remote
location.

On disk a copy is a plain directory, which training maps and every tool can read. In the remote location
(weights.tiers.objects) each file is split into objects of up to 32 MiB:

    copies/<kind>s/<model>/<version>               the manifest; written last, so a version with a manifest is complete
    parts/<kind>s/<model>/<version>/<file>.<n>     the n-th part of a file of the version

Parts with 8-bit moments consist of blocks (weights.tiers.moments). Only one process writes a location; any may read it.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from weights.format.errors import IntegrityError, ObjectDamaged, TierFull, TierUnavailable, VersionNotFound
from weights.format.layout import Layout
from weights.format.manifest import CHUNK_BYTES, Chunks, Manifest, aux_files_of, checksum, chunks_of, hashed, read_whole
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE, Name, encode_name, replace_file, sync
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore, directories
from weights.tiers import moments
from weights.tiers.objects import Objects, tier_errors

STAGING = ".staging"
OWNER_KEY = "owner"
MOMENTS = "moments_in_8_bits"
"""Key of a manifest's meta: the ranges of moments in each file of a snapshot (weights.tiers.moments.Range)."""
log = logging.getLogger(__name__)


class Copies(ABC):
    """The copies in one tier. `where`: the tier's path or URL, for messages. Every call may raise TierUnavailable."""

    where: str

    @abstractmethod
    def manifests(self) -> dict[Name, Manifest]:
        """Every version with a readable manifest."""

    @abstractmethod
    def remove(self, name: Name) -> None:
        """Remove the copy of `name`, which becomes invisible atomically. Idempotent."""

    @abstractmethod
    def collect(self) -> None:
        """Remove leftovers of a dead process's copies and removals. Call it while no copy runs."""

    @abstractmethod
    def _open(self, name: Name) -> tuple[str, Manifest, Chunks]:
        """Return for `name` its location for messages, manifest, and chunks of files. Raises VersionNotFound,
        IntegrityError."""

    @abstractmethod
    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, checksums: Mapping[str, str]) -> None:
        """Store the files from their `chunks`, then replace an older copy. `checksums` is complete once all chunks are
        read. Raises TierFull."""

    def put(self, source: Path, moved: Callable[[int], object] = lambda nbytes: None) -> None:
        """Copy the version directory `source`, which must not change meanwhile (lease it if it is in shared memory).

        `moved` is called with the size of each copied chunk; an exception from it aborts the copy. Raises TierFull, and
        IntegrityError if the bytes differ from the manifest; no copy becomes visible then.
        """
        manifest, layout, checksums = Manifest.read(source), Layout.read(source), dict[str, str]()

        def chunks(file: str) -> Iterator[bytes]:
            read, expected = chunks_of(source, manifest, file), manifest.files[file].checksum
            for chunk in hashed(read, expected, checksums, path=source, file=file):
                yield chunk
                moved(len(chunk))

        self._write(manifest, layout, chunks, checksums)

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restore `name` into `store` as an evictable version, and check every byte before the version becomes visible.
        Raises VersionNotFound, IntegrityError, StoreFull, VersionExists."""
        where, manifest, chunks = self._open(name)
        return store.receive(manifest, chunks, source=where)


class DirectoryCopies(Copies):
    """`<models>/<model>/<version>/` and `<snapshots>/<job>/<step>/` with a sealed manifest each. Copies never reduce
    the file system's free space below `free_bytes`."""

    def __init__(self, models: Path, snapshots: Path | None = None, *, free_bytes: int = 0) -> None:
        self.where = str(models.parent)
        self._models, self._snapshots = models, snapshots or models.with_name("snapshots")
        self._free_bytes = free_bytes

    def path(self, name: Name) -> Path:
        """Return the path of a version, whether or not the version exists. Raises InvalidName."""
        root = self._snapshots if name.kind == "snapshot" else self._models
        return root / encode_name(name.model) / encode_name(name.version)

    def manifests(self) -> dict[Name, Manifest]:
        manifests = {}
        families = (family for root in (self._models, self._snapshots) for family in directories(root))
        for folder in (folder for family in families for folder in directories(family)):
            with suppress(IntegrityError):
                manifest = Manifest.read(folder)
                if self.path(name := manifest.name) == folder:  # skip versions being copied or removed
                    manifests[name] = manifest
        return manifests

    def remove(self, name: Name) -> None:
        path = self.path(name)
        with tier_errors(path):
            hidden = self._staged(path, "removed")
            try:
                os.rename(path, hidden)
            except FileNotFoundError:
                return
            sync(path.parent)
            shutil.rmtree(hidden)
            with suppress(OSError):  # not empty, because other versions of the model remain
                path.parent.rmdir()

    def collect(self) -> None:
        for root in (self._models, self._snapshots):
            for purpose in ("copy", "removed"):
                for path in (root / STAGING).glob(f"{purpose}-*"):
                    shutil.rmtree(path, ignore_errors=True)

    def _open(self, name: Name) -> tuple[str, Manifest, Chunks]:
        if not (path := self.path(name)).is_dir():
            raise VersionNotFound(f"{name} is not on disk")
        manifest = Manifest.read(path)
        return str(path), manifest, partial(chunks_of, path, manifest)

    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, checksums: Mapping[str, str]) -> None:
        target = self.path(name := manifest.name)
        with tier_errors(target):
            staged = self._staged(target, "copy")
            free = shutil.disk_usage(staged.parent).free
            if free - manifest.nbytes < self._free_bytes:
                raise TierFull(
                    f"{self.where} has {free} bytes free and must keep {self._free_bytes}: {manifest.nbytes} bytes "
                    "do not fit; free space, or keep fewer versions and snapshots"
                )
            try:
                staged.mkdir(mode=0o700)
                for file in manifest.files:
                    _write_out(staged / file, chunks(file))
                replace_file(staged / MANIFEST_FILE, manifest.with_checksums(checksums).to_bytes(), durable=True)
                self.remove(name)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(staged, target)
                sync(target.parent)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    def _staged(self, path: Path, purpose: str) -> Path:
        # The sweep of the model library reads the process id from this name.
        staging = path.parent.parent / STAGING
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        return staging / f"{purpose}-{os.getpid()}-{uuid.uuid4().hex}"


class RemoteCopies(Copies):
    """Copies in a remote location. `int8_moments`: store Adam's moments of snapshots in 8 bits."""

    def __init__(self, objects: Objects, *, int8_moments: bool = False) -> None:
        self.where, self._objects, self._int8_moments = objects.where, objects, int8_moments
        self._records: dict[Name, Manifest] | None = None

    def claim(self, owner: str, first: bool) -> None:
        """Checks that the location belongs to `owner`; claims it if it has no owner and this is the `first` use.

        Raises TierUnavailable otherwise: a lost mount leaves an empty directory, and two boxes in one location would
        remove each other's objects.
        """
        try:
            holder = self._objects.get(OWNER_KEY).decode(errors="replace")
        except ObjectDamaged:
            if not first:
                raise TierUnavailable(f"{self.where} is empty, although this box wrote to it; is it mounted?") from None
            self._objects.put(OWNER_KEY, owner.encode())
            holder = owner
        if holder != owner:
            raise TierUnavailable(
                f"{self.where} belongs to box {holder[:40]!r}, this is {owner!r}; give each box its own location, or "
                f"delete {OWNER_KEY} there to take it over"
            )

    def manifests(self) -> dict[Name, Manifest]:
        """Every version with a readable manifest. Reads the location only once, since no other process writes it."""
        if self._records is None:
            records = {}
            for key in list(self._objects.list("copies/")):
                try:
                    manifest = Manifest.from_bytes(self._objects.get(key), path=f"{self.where}/{key}")
                except IntegrityError as error:
                    log.error("the remote tier has a damaged manifest: %s", error)
                    continue
                if key == f"copies/{manifest.name.key}":
                    records[manifest.name] = manifest
            self._records = records
        return self._records

    def remove(self, name: Name) -> None:
        self._objects.delete(f"copies/{name.key}")
        self.manifests().pop(name, None)
        for key in list(self._objects.list(f"parts/{name.key}/")):
            self._objects.delete(key)

    def collect(self) -> None:
        self._objects.sweep()
        complete = tuple(f"parts/{name.key}/" for name in self.manifests())
        for key in list(self._objects.list("parts/")):
            if not key.startswith(complete):
                self._objects.delete(key)

    def _open(self, name: Name) -> tuple[str, Manifest, Chunks]:
        if (manifest := self.manifests().get(name)) is None:
            raise VersionNotFound(f"{name} is not at {self.where}")

        def chunks(file: str) -> Iterator[bytes]:
            ranges, nbytes = manifest.meta.get(MOMENTS, {}).get(file), manifest.files[file].nbytes
            for number, start in enumerate(range(0, nbytes, CHUNK_BYTES)):
                data = self._objects.get(_part_key(name, file, number))
                yield moments.decode(data, ranges, start, min(CHUNK_BYTES, nbytes - start)) if ranges else data

        return f"{self.where}/{name.key}", manifest, chunks

    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, checksums: Mapping[str, str]) -> None:
        name, decoded_checksums = manifest.name, dict[str, str]()
        ranges = moments.ranges_of(layout) if self._int8_moments and name.kind == "snapshot" else {}
        for file in manifest.files:
            decoded = blake3()
            for number, data in enumerate(chunks(file)):
                if file in ranges:
                    start, nbytes = number * CHUNK_BYTES, len(data)
                    data = moments.encode(data, ranges[file], start)
                    decoded.update(moments.decode(data, ranges[file], start, nbytes))
                self._objects.put(_part_key(name, file, number), data)
            if file in ranges:
                decoded_checksums[file] = checksum(decoded)  # the checksum is of the decoded bytes
        meta = {key: value for key, value in manifest.meta.items() if key != MOMENTS}
        meta |= {MOMENTS: ranges} if ranges else {}
        manifest = manifest.with_checksums({**checksums, **decoded_checksums}, meta=meta)
        self._objects.put(f"copies/{name.key}", manifest.to_bytes())
        self.manifests()[name] = manifest


def _part_key(name: Name, file: str, number: int) -> str:
    return f"parts/{name.key}/{file}.{number:06}"


def verify(directory: Path) -> Manifest:
    """Check all bytes of a version directory and return the manifest. Raises IntegrityError naming the file."""
    manifest = Manifest.read(directory)
    return read_whole(manifest, partial(chunks_of, directory, manifest), source=directory)


def take_in(store: WeightStore, directory: Path, *, pinned: bool = False) -> StoredVersion:
    """Copy the version directory into `store` under the manifest's name. Raises the errors of `WeightStore.receive`."""
    manifest = Manifest.read(directory)
    return store.receive(manifest, partial(chunks_of, directory, manifest), source=directory, pinned=pinned)


def seal_dir(
    directory: Path, *, kind: str, model: str, version: str, meta: Mapping[str, Any] | None = None
) -> Manifest:
    """Atomically writes a manifest with checksums for a foreign checkpoint directory, such as a download, and the index
    of several files if it is missing.

    Raises IntegrityError or InvalidLayout if the directory is not a valid checkpoint.
    """
    layout, aux = Layout.read(directory), aux_files_of(directory)
    index = layout.index_file()
    if index is not None and not any(name.endswith(INDEX_SUFFIX) for name in aux):
        replace_file(directory / index[0], index[1], durable=True)
        aux[index[0]] = index[1]
    manifest = Manifest.describe(layout, Name(kind, model, version), meta=meta or {}, aux_files=aux)
    manifest = read_whole(manifest, partial(chunks_of, directory, manifest), source=directory)
    replace_file(directory / MANIFEST_FILE, manifest.to_bytes(), durable=True)
    return manifest


def _write_out(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a new file durably, and drop it from the page cache to free memory for serving."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
