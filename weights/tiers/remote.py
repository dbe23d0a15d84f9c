"""Versions and snapshots at a remote place, each file in objects of up to 32 MiB.

    copies/<kind>s/<model>/<version>               the manifest; written last, so a version with a record is complete
    parts/<kind>s/<model>/<version>/<file>.<n>     the n-th part of a file of the version

Of a moment in 8 bits an object has blocks (weights.tiers.moments). One process writes a place; any may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from weights.format.checksums import hashed
from weights.format.errors import IntegrityError, ObjectDamaged, TierUnavailable, VersionNotFound
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.source import CHUNK_BYTES, chunks_of
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import moments
from weights.tiers.directory import Moved
from weights.tiers.objects import Objects
from weights.tiers.record import Name

OWNER_KEY = "owner"
MOMENTS = "moments_in_8_bits"
log = logging.getLogger(__name__)


class RemoteTier:
    """The same verbs as `weights.tiers.directory.DirectoryTier`. `int8_moments`: the Adam moments of snapshots are
    stored in 8 bits. Every call may raise TierUnavailable."""

    def __init__(self, objects: Objects, *, int8_moments: bool = False) -> None:
        self.where = objects.where
        self._objects, self._int8_moments = objects, int8_moments
        self._records: dict[Name, Manifest] | None = None

    def claim(self, owner: str, first: bool) -> None:
        """Checks that the place belongs to `owner`; claims it if it has no owner and this is the `first` time.

        Raises TierUnavailable otherwise: a lost mount leaves an empty directory, and two boxes in one place would
        remove each other's objects.
        """
        try:
            found = self._objects.get(OWNER_KEY).decode(errors="replace")
        except ObjectDamaged:
            if not first:
                raise TierUnavailable(f"{self.where} is empty, and this box wrote to it; is it mounted?") from None
            self._objects.put(OWNER_KEY, owner.encode())
            found = owner
        if found != owner:
            raise TierUnavailable(
                f"{self.where} belongs to box {found[:40]!r}, this is {owner!r}; give each box a place of its own, or "
                f"delete {OWNER_KEY} there to take it over"
            )

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Writes the version directory `source`, which must not change meanwhile (in shared memory: lease it).

        Raises IntegrityError if its bytes differ from its manifest; nothing has a record then. Raises TierFull.
        """
        manifest, layout, found = Manifest.read(source), Layout.read(source), dict[str, str]()
        manifest.check_layout(layout, path=source)
        name = _name(manifest)
        lossy = moments.ranges_of(layout) if self._int8_moments and name.kind == "snapshot" else {}
        for file, record in manifest.files.items():
            chunks = hashed(chunks_of(source, file, record.nbytes), record.checksum, found, path=source, file=file)
            sent = self._send(name, file, chunks, lossy.get(file, []), moved)
            if file in lossy:  # the checksum is of what will be read
                sent = hashed(sent, None, found, path=source, file=file)
            for _ in sent:
                pass
        exact = {key: value for key, value in manifest.meta.items() if key != MOMENTS}
        manifest = replace(manifest, meta=exact | ({MOMENTS: lossy} if lossy else {})).with_checksums(found)
        self._objects.put(f"copies/{name.key}", manifest.to_bytes())
        self.manifests()[name] = manifest

    def _send(
        self, name: Name, file: str, chunks: Iterable[bytes], ranges: list[moments.Range], moved: Moved
    ) -> Iterator[bytes]:
        """Writes a file's objects; passes on what will be read of them."""
        for number, chunk in enumerate(chunks):
            start = number * CHUNK_BYTES
            data = moments.encode(chunk, ranges, start) if ranges else chunk
            self._objects.put(_object_key(name, file, number), data)
            moved(len(data))
            yield moments.decode(data, ranges, start, len(chunk)) if ranges else chunk

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if it is not here, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        return store.receive(self._find(name), partial(self._chunks, name), source=f"{self.where}/{name.key}")

    def verify(self, name: Name) -> Manifest:
        """Reads every byte of `name` and compares it. Raises VersionNotFound, IntegrityError."""
        manifest, where = self._find(name), f"{self.where}/{name.key}"
        for file, record in manifest.files.items():
            for _ in hashed(self._chunks(name, file), record.checksum, {}, path=where, file=file):
                pass
        return manifest

    def remove(self, name: Name) -> None:
        """Removes `name`, its record first. Idempotent."""
        self._objects.delete(f"copies/{name.key}")
        self.manifests().pop(name, None)
        for key, _ in list(self._objects.list(f"parts/{name.key}/")):
            self._objects.delete(key)

    def collect(self) -> None:
        """Removes what copies that never ended have left. Call it while nothing is copied."""
        self._objects.sweep()
        complete = tuple(f"parts/{name.key}/" for name in self.manifests())
        for key, _ in list(self._objects.list("parts/")):
            if not key.startswith(complete):
                self._objects.delete(key)

    def _find(self, name: Name) -> Manifest:
        if name not in self.manifests():
            raise VersionNotFound(f"{name} is not at {self.where}")
        return self.manifests()[name]

    def manifests(self) -> dict[Name, Manifest]:
        """What the place had when it was first read, and what this process has put and removed since."""
        if self._records is None:
            known = {}
            for key, _ in list(self._objects.list("copies/")):
                try:
                    manifest = Manifest.from_bytes(self._objects.get(key), path=f"{self.where}/{key}")
                except IntegrityError as error:
                    log.error("the remote tier has a damaged record: %s", error)
                    continue
                name = _name(manifest)
                if key == f"copies/{name.key}":
                    known[name] = manifest
            self._records = known
        return self._records

    def _chunks(self, name: Name, file: str) -> Iterator[bytes]:
        """The bytes of a file. Raises ObjectDamaged."""
        manifest = self._find(name)
        ranges, nbytes = manifest.meta.get(MOMENTS, {}).get(file), manifest.files[file].nbytes
        for number, start in enumerate(range(0, nbytes, CHUNK_BYTES)):
            data = self._objects.get(_object_key(name, file, number))
            yield moments.decode(data, ranges, start, min(CHUNK_BYTES, nbytes - start)) if ranges else data


def _object_key(name: Name, file: str, number: int) -> str:
    return f"parts/{name.key}/{file}.{number:06}"


def _name(manifest: Manifest) -> Name:
    return Name(manifest.kind, manifest.model, manifest.version)
