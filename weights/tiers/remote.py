"""Versions and snapshots at a remote place, each as one stream of bytes in objects of up to 32 MiB.

    records/<kind>s/<model>/<version>       the manifest; written last, so a version with a record is complete
    objects/<kind>s/<model>/<version>/<n>   in order: headers of its files, auxiliary files, tensors

Of a moment in 8 bits the stream has blocks, each behind its length. One process writes a place; any may read it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from weights.format.checksums import Running, compare
from weights.format.errors import IntegrityError, ObjectDamaged, TierUnavailable, VersionNotFound
from weights.format.files import open_regular
from weights.format.header import LENGTH_BYTES, header_bytes_needed, parse_header
from weights.format.layout import FileLayout, Layout, Placed
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX
from weights.format.source import READ_BYTES, check_aux, tensor_chunks
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import moments
from weights.tiers.objects import Objects
from weights.tiers.record import Name

OBJECT_BYTES = 32 << 20
OWNER_KEY = "owner"
_LENGTH = struct.Struct("<I")
log = logging.getLogger(__name__)

Moved = Callable[[int], object]
"""Called with the bytes of each chunk that was copied; an exception from it aborts the copy."""


class RemoteTier:
    """`int8_moments`: the Adam moments of snapshots are stored in 8 bits. Every call may raise TierUnavailable."""

    def __init__(self, objects: Objects, *, int8_moments: bool = False) -> None:
        self.where = objects.where
        self._objects = objects
        self._int8_moments = int8_moments
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
        manifest, layout = Manifest.read(source), Layout.read(source)
        manifest.check_layout(layout, path=source)
        name = Name(manifest.kind, manifest.model, manifest.version)
        aux = {}
        for file in _aux_names(manifest):
            with open_regular(source, file) as opened:
                aux[file] = opened.readall()
        check_aux(manifest, aux, path=source)
        lossy: set[str] = set()
        if self._int8_moments and name.kind == "snapshot":
            lossy = {placed.spec.name for placed in layout if moments.is_moment(placed.spec)}
        manifest = replace(manifest, meta={**manifest.meta, "quantised": sorted(lossy)})
        writer = _Writer(self._objects, name, moved)
        for data in (*(file.header for file in layout.files), *aux.values()):
            writer.add(data)
        digests = {}
        for placed in layout:
            tensor, running, approximate = placed.spec.name, Running(), Running()
            for chunk in tensor_chunks(source, placed, running):
                if tensor not in lossy:
                    writer.add(chunk)
                    continue
                blob = moments.encode(chunk, tensor)
                approximate.update(moments.decode(blob, tensor, len(chunk)))
                writer.add(_LENGTH.pack(len(blob)) + blob)
            compare({tensor: running.text()}, {tensor: manifest.tensors[tensor].checksum}, layout, path=source)
            digests[tensor] = (approximate if tensor in lossy else running).text()
        writer.flush()
        manifest = manifest.with_checksums(digests)
        self._objects.put(f"records/{name.key}", manifest.to_bytes())
        self._known()[name] = manifest

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if it is not here, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        copy = _Copy(self._objects, name, self._find(name))
        expected = {tensor: record.checksum for tensor, record in copy.manifest.tensors.items()}
        with store.reserve(copy.layout, **name._asdict(), aux_files=copy.aux) as draft:
            for placed in copy.layout:
                at = 0
                for data in copy.chunks(placed):  # no view outlives a chunk: it would hold an aborted draft
                    draft.view(placed.spec.name)[at : at + len(data)] = data
                    at += len(data)
            return draft.commit(
                meta=copy.manifest.meta, pinned=False, expected_checksums=expected, source=f"{self.where}/{name.key}"
            )

    def verify(self, name: Name) -> Manifest:
        """Reads every byte of `name` and compares it. Raises VersionNotFound, IntegrityError."""
        copy = _Copy(self._objects, name, self._find(name))
        for placed in copy.layout:
            running, tensor = Running(), placed.spec.name
            for data in copy.chunks(placed):
                running.update(data)
            expected = {tensor: copy.manifest.tensors[tensor].checksum}
            compare({tensor: running.text()}, expected, copy.layout, path=f"{self.where}/{name.key}")
        return copy.manifest

    def remove(self, name: Name) -> None:
        """Removes `name`, its record first. Idempotent."""
        self._objects.delete(f"records/{name.key}")
        self._known().pop(name, None)
        for key, _ in list(self._objects.list(f"objects/{name.key}/")):
            self._objects.delete(key)

    def collect(self) -> None:
        """Removes what copies that never ended have left. Call it while nothing is copied."""
        self._objects.sweep()
        whole = tuple(f"objects/{name.key}/" for name in self._known())
        for key, _ in list(self._objects.list("objects/")):
            if not key.startswith(whole):
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


class _Writer:
    """Cuts a stream into objects."""

    def __init__(self, objects: Objects, name: Name, moved: Moved) -> None:
        self._objects, self._name, self._moved = objects, name, moved
        self._filled, self._number = bytearray(), 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            taken = view[: OBJECT_BYTES - len(self._filled)]
            self._filled += taken
            view = view[len(taken) :]
            if len(self._filled) == OBJECT_BYTES:
                self.flush()

    def flush(self) -> None:
        if not self._filled:
            return
        self._objects.put(_object_key(self._name, self._number), bytes(self._filled))
        self._moved(len(self._filled))
        self._filled, self._number = bytearray(), self._number + 1


class _Copy:
    """A version that is read from its objects: its layout and auxiliary files at once, then `chunks` of each tensor in
    order. Raises IntegrityError where the objects do not fit the manifest."""

    def __init__(self, objects: Objects, name: Name, manifest: Manifest) -> None:
        self.manifest = manifest
        self._objects, self._name = objects, name
        self._lossy = frozenset(manifest.meta.get("quantised", ()))
        self._buffer, self._number = bytearray(), 0
        self.layout = Layout(tuple(self._header(file) for file in sorted(manifest.files)))
        manifest.check_layout(self.layout, path=name.key)
        self.aux = {file: self._read(manifest.aux_files[file].nbytes) for file in _aux_names(manifest)}
        check_aux(manifest, self.aux, path=name.key)

    def chunks(self, placed: Placed) -> Iterator[bytes | memoryview]:
        for start in range(0, placed.nbytes, READ_BYTES):
            nbytes = min(READ_BYTES, placed.nbytes - start)
            if placed.spec.name in self._lossy:
                (stored,) = _LENGTH.unpack(self._read(_LENGTH.size))
                yield moments.decode(self._read(stored), placed.spec.name, nbytes)
            else:
                yield self._read(nbytes)

    def _header(self, file: str) -> FileLayout:
        file_bytes = self.manifest.files[file].nbytes
        prefix = self._read(LENGTH_BYTES)
        needed = header_bytes_needed(prefix, path=self._name.key, file=file, file_bytes=file_bytes)
        header = prefix + self._read(needed - LENGTH_BYTES)
        tensors = parse_header(header, path=self._name.key, file=file, file_bytes=file_bytes)
        return FileLayout(file, header, tuple(Placed(spec, file, start, end) for spec, start, end in tensors))

    def _read(self, nbytes: int) -> bytes:
        while len(self._buffer) < nbytes:
            self._buffer += self._objects.get(_object_key(self._name, self._number))
            self._number += 1
        data = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return data


def _object_key(name: Name, number: int) -> str:
    return f"objects/{name.key}/{number:06}"


def _aux_names(manifest: Manifest) -> list[str]:
    """All but the index, which follows from the headers."""
    return sorted(name for name in manifest.aux_files if not name.endswith(INDEX_SUFFIX))
