"""Versions and snapshots at a remote place, each file in objects of up to 32 MiB.

    records/<kind>s/<model>/<version>              the manifest; written last, so a version with a record is complete
    objects/<kind>s/<model>/<version>/<file>.<n>   the n-th part of a file of the version

One process writes a place; any may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from weights.format.checksums import checksum_of, compare
from weights.format.errors import IntegrityError, ObjectDamaged, TierUnavailable, VersionNotFound
from weights.format.files import open_regular
from weights.format.header import TensorSpec
from weights.format.layout import FileLayout, Layout, Placed
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX
from weights.format.source import check_aux, whole
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers.copies import Moved
from weights.tiers.objects import Objects
from weights.tiers.record import Name

OBJECT_BYTES = 32 << 20
OWNER_KEY = "owner"
log = logging.getLogger(__name__)


class RemoteTier:
    """Every call may raise TierUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self.where = objects.where
        self._objects = objects
        self._records: dict[Name, Manifest] | None = None
        self._last = ("", b"")  # key and bytes of the object read last: tensors are smaller

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

    def names(self) -> dict[Name, float]:
        """Creation time (Unix seconds) by name."""
        return {name: manifest.created_s for name, manifest in self._known().items()}

    def usage_bytes(self) -> int:
        return sum(manifest.nbytes for manifest in self._known().values())

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Writes the version directory `source`, which must not change meanwhile (in shared memory: lease it).

        Raises IntegrityError if its bytes differ from its manifest; nothing has a record then. Raises TierFull.
        """
        manifest = whole(source, moved)
        name = Name(manifest.kind, manifest.model, manifest.version)
        for file in (*manifest.files, *_aux_names(manifest)):
            with open_regular(source, file) as opened:
                for number in count():
                    if not (data := opened.read(OBJECT_BYTES)):
                        break
                    self._objects.put(_object_key(name, file, number), data)
                    moved(len(data))
        self._objects.put(f"records/{name.key}", manifest.to_bytes())
        self._known()[name] = manifest

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if it is not here, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        manifest = self._find(name)
        layout = self._layout(name, manifest)
        aux = {
            file: b"".join(self._bytes(name, file, 0, manifest.aux_files[file].nbytes)) for file in _aux_names(manifest)
        }
        check_aux(manifest, aux, path=name.key)
        expected = {tensor: record.checksum for tensor, record in manifest.tensors.items()}
        with store.reserve(layout, **name._asdict(), aux_files=aux) as draft:
            for file in layout.files:
                at = 0
                for data in self._bytes(name, file.name, 0, file.nbytes):
                    # No view outlives a chunk: it would hold an aborted draft.
                    draft.file_view(file.name)[at : at + len(data)] = data
                    at += len(data)
            return draft.commit(
                meta=manifest.meta, pinned=False, expected_checksums=expected, source=f"{self.where}/{name.key}"
            )

    def verify(self, name: Name) -> Manifest:
        """Reads every byte of `name` and compares it. Raises VersionNotFound, IntegrityError."""
        manifest = self._find(name)
        layout = self._layout(name, manifest)
        for placed in layout:
            tensor = placed.spec.name
            found = checksum_of(self._bytes(name, placed.file, placed.start, placed.end))
            expected = manifest.tensors[tensor].checksum
            compare({tensor: found}, {tensor: expected}, layout, path=f"{self.where}/{name.key}")
        return manifest

    def remove(self, name: Name) -> None:
        """Removes `name`, its record first. Idempotent."""
        self._objects.delete(f"records/{name.key}")
        self._known().pop(name, None)
        for key, _ in list(self._objects.list(f"objects/{name.key}/")):
            self._objects.delete(key)

    def collect(self) -> None:
        """Removes what copies that never ended have left. Call it while nothing is copied."""
        self._objects.sweep()
        complete = tuple(f"objects/{name.key}/" for name in self._known())
        for key, _ in list(self._objects.list("objects/")):
            if not key.startswith(complete):
                self._objects.delete(key)

    def _find(self, name: Name) -> Manifest:
        if name not in self._known():
            raise VersionNotFound(f"{name} is not at {self.where}")
        return self._known()[name]

    def _known(self) -> dict[Name, Manifest]:
        """What the place had when it was first read, and what this process has put and removed since."""
        if self._records is None:
            known = {}
            for key, _ in list(self._objects.list("records/")):
                try:
                    manifest = Manifest.from_bytes(self._objects.get(key), path=f"{self.where}/{key}")
                except IntegrityError as error:
                    log.error("the remote tier has a damaged record: %s", error)
                    continue
                name = Name(manifest.kind, manifest.model, manifest.version)
                if key == f"records/{name.key}":
                    known[name] = manifest
            self._records = known
        return self._records

    def _layout(self, name: Name, manifest: Manifest) -> Layout:
        """By the manifest, with the headers of the files. Raises IntegrityError."""
        placed: dict[str, list[Placed]] = {file: [] for file in manifest.files}
        for tensor, record in manifest.tensors.items():
            spec = TensorSpec(tensor, record.dtype, record.shape)
            placed[record.file].append(Placed(spec, record.file, record.start, record.end))
        files = []
        for file, tensors in placed.items():
            tensors.sort(key=lambda one: (one.start, one.end))
            begin = tensors[0].start if tensors else manifest.files[file].nbytes
            files.append(FileLayout(file, b"".join(self._bytes(name, file, 0, begin)), tuple(tensors)))
        layout = Layout(tuple(files))
        manifest.check_layout(layout, path=name.key)
        return layout

    def _bytes(self, name: Name, file: str, start: int, end: int) -> Iterator[memoryview]:
        """Bytes [start, end) of a file of the version. Raises ObjectDamaged."""
        while start < end:
            number, at = divmod(start, OBJECT_BYTES)
            key = _object_key(name, file, number)
            last = self._last
            if last[0] != key:
                last = self._last = key, self._objects.get(key)
            piece = memoryview(last[1])[at : min(OBJECT_BYTES, at + end - start)]
            if not piece:
                raise ObjectDamaged("it is too short", path=f"{self.where}/{key}")
            yield piece
            start += len(piece)


def _object_key(name: Name, file: str, number: int) -> str:
    return f"objects/{name.key}/{file}.{number:06}"


def _aux_names(manifest: Manifest) -> list[str]:
    """All but the index, which follows from the headers."""
    return [name for name in manifest.aux_files if not name.endswith(INDEX_SUFFIX)]
