"""Versions and snapshots at a remote place, each file in objects of up to 32 MiB.

    copies/<kind>s/<model>/<version>               the manifest; written last, so a version with a record is complete
    parts/<kind>s/<model>/<version>/<file>.<n>     the n-th part of a file of the version

Of a moment in 8 bits a part has blocks (weights.tiers.moments), each behind its length.
One process writes a place; any may read it. `records/` and `objects/` there are of an older build, and are left alone.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from weights.format.checksums import Running, checksum_of, compare
from weights.format.errors import IntegrityError, ObjectDamaged, TierUnavailable, VersionNotFound
from weights.format.files import open_regular
from weights.format.header import TensorSpec
from weights.format.layout import FileLayout, Layout, Placed
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX
from weights.format.source import check_aux, whole
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import moments
from weights.tiers.copies import Moved
from weights.tiers.objects import Objects
from weights.tiers.record import Name

OBJECT_BYTES = 32 << 20
OWNER_KEY = "owner"
_NONE_READ = ("", b"")
_LENGTH = struct.Struct("<I")
log = logging.getLogger(__name__)


class RemoteTier:
    """`int8_moments`: the Adam moments of snapshots are stored in 8 bits. Every call may raise TierUnavailable."""

    def __init__(self, objects: Objects, *, int8_moments: bool = False) -> None:
        self.where = objects.where
        self._objects = objects
        self._int8_moments = int8_moments
        self._records: dict[Name, Manifest] | None = None
        self._last = _NONE_READ  # key and bytes of the object read last: tensors are smaller

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
        """Bytes of the versions and snapshots; moments in 8 bits take less at the place."""
        return sum(manifest.nbytes for manifest in self._known().values())

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Writes the version directory `source`, which must not change meanwhile (in shared memory: lease it).

        Raises IntegrityError if its bytes differ from its manifest; nothing has a record then. Raises TierFull.
        """
        manifest = whole(source, moved)
        name, lossy = _name(manifest), list[str]()
        if self._int8_moments and name.kind == "snapshot":
            lossy = sorted(
                tensor for tensor, record in manifest.tensors.items() if moments.is_moment(tensor, record.dtype)
            )
        manifest = replace(manifest, meta={**manifest.meta, "quantised": lossy})
        sums = {tensor: Running() for tensor in lossy}
        for file in (*manifest.files, *_aux_names(manifest)):
            with open_regular(source, file) as opened:
                for number in count():
                    if not (data := opened.read(OBJECT_BYTES)):
                        break
                    data = _encoded(manifest, file, number, data, sums)
                    self._objects.put(_object_key(name, file, number), data)
                    moved(len(data))
        exact = {tensor: record.checksum for tensor, record in manifest.tensors.items() if record.checksum}
        manifest = manifest.with_checksums(exact | {tensor: running.text() for tensor, running in sums.items()})
        self._objects.put(f"copies/{name.key}", manifest.to_bytes())
        self._known()[name] = manifest

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if it is not here, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        manifest = self._find(name)
        expected = {tensor: record.checksum for tensor, record in manifest.tensors.items()}
        with (
            self._reading(name, manifest) as (layout, aux),
            store.reserve(layout, **name._asdict(), aux_files=aux) as draft,
        ):
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
        with self._reading(name, manifest) as (layout, _):
            for placed in layout:
                tensor = placed.spec.name
                found = checksum_of(self._bytes(name, placed.file, placed.start, placed.end))
                expected = manifest.tensors[tensor].checksum
                compare({tensor: found}, {tensor: expected}, layout, path=f"{self.where}/{name.key}")
        return manifest

    @contextmanager
    def _reading(self, name: Name, manifest: Manifest) -> Iterator[tuple[Layout, dict[str, bytes]]]:
        """The layout and the auxiliary files, checked; no object that is read meanwhile is kept afterwards."""
        try:
            layout = self._layout(name, manifest)
            sizes = {file: manifest.aux_files[file].nbytes for file in _aux_names(manifest)}
            aux = {file: b"".join(self._bytes(name, file, 0, nbytes)) for file, nbytes in sizes.items()}
            check_aux(manifest, aux, path=name.key)
            yield layout, aux
        finally:
            self._last = _NONE_READ

    def remove(self, name: Name) -> None:
        """Removes `name`, its record first. Idempotent."""
        self._objects.delete(f"copies/{name.key}")
        self._known().pop(name, None)
        for key, _ in list(self._objects.list(f"parts/{name.key}/")):
            self._objects.delete(key)

    def collect(self) -> None:
        """Removes what copies that never ended have left. Call it while nothing is copied."""
        self._objects.sweep()
        complete = tuple(f"parts/{name.key}/" for name in self._known())
        for key, _ in list(self._objects.list("parts/")):
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
                last = self._last = key, _decoded(self._find(name), file, number, self._objects.get(key))
            piece = memoryview(last[1])[at : min(OBJECT_BYTES, at + end - start)]
            if not piece:
                raise ObjectDamaged("it is too short", path=f"{self.where}/{key}")
            yield piece
            start += len(piece)


def _object_key(name: Name, file: str, number: int) -> str:
    return f"parts/{name.key}/{file}.{number:06}"


def _aux_names(manifest: Manifest) -> list[str]:
    """All but the index, which follows from the headers."""
    return [name for name in manifest.aux_files if not name.endswith(INDEX_SUFFIX)]


def _parts(manifest: Manifest, file: str, number: int) -> Iterator[tuple[str, int]]:
    """(moment, bytes) of each part of the n-th object of a file, in order; the moment is "" where bytes are exact."""
    nbytes = (manifest.files.get(file) or manifest.aux_files[file]).nbytes
    start, end = number * OBJECT_BYTES, min(nbytes, (number + 1) * OBJECT_BYTES)
    lossy = ((manifest.tensors[tensor], tensor) for tensor in manifest.meta.get("quantised", ()))
    ranges = sorted((record.start, record.end, tensor) for record, tensor in lossy if record.file == file)
    for first, last, tensor in ranges:
        first, last = max(start, first), min(end, last)
        if first < last:
            yield "", first - start
            yield tensor, last - first
            start = last
    yield "", end - start


def _encoded(manifest: Manifest, file: str, number: int, data: bytes, sums: Mapping[str, Running]) -> bytes:
    """The n-th object of a file. sums: checksums of what will be read of each moment."""
    if not sums:
        return data
    encoded, at = bytearray(), 0
    for tensor, nbytes in _parts(manifest, file, number):
        part, at = data[at : at + nbytes], at + nbytes
        if tensor:
            part = moments.encode(part, tensor)
            sums[tensor].update(moments.decode(part, tensor, nbytes))
            encoded += _LENGTH.pack(len(part))
        encoded += part
    return bytes(encoded)


def _decoded(manifest: Manifest, file: str, number: int, data: bytes) -> bytes:
    """The bytes of the file in its n-th object. Raises ObjectDamaged."""
    if not manifest.meta.get("quantised"):
        return data
    decoded, at = bytearray(), 0
    for tensor, nbytes in _parts(manifest, file, number):
        if tensor:
            if len(data) < at + _LENGTH.size:
                raise ObjectDamaged("it is too short", path=_object_key(_name(manifest), file, number))
            stored, at = _LENGTH.unpack_from(data, at)[0], at + _LENGTH.size
            decoded += moments.decode(data[at : at + stored], tensor, nbytes)
            at += stored
        else:
            decoded += data[at : at + nbytes]
            at += nbytes
    return bytes(decoded)


def _name(manifest: Manifest) -> Name:
    return Name(manifest.kind, manifest.model, manifest.version)
