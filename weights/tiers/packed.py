"""Implements a packed tier: versions and snapshots as shared compressed objects, on a disk or a remote store.

    records/<kind>s/<model>/<version>      its contents; written last, so a version with a record is complete
    objects/<2 digits>/<BLAKE3 of itself>  up to 32 MiB of pieces, encoded by `weights.tiers.codec`

An object's name is the checksum of its stored bytes. So no object is written twice, nothing is sent again after a
crash, and the name reveals a damaged object. A tensor whose checksum is in another record of the tier is not written;
the new record references the old bytes. One process writes a tier; any number may read it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from blake3 import blake3

from weights.format.checksums import Running, checksum, compare
from weights.format.errors import (
    ChecksumMismatch,
    HeaderInvalid,
    IntegrityError,
    ObjectDamaged,
    TierUnavailable,
    VersionNotFound,
)
from weights.format.files import open_regular
from weights.format.header import DTYPE_BITS, parse_header
from weights.format.layout import FileLayout, Layout, Placed, TensorSpec
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX
from weights.format.source import tensor_checksum, tensor_chunks
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import codec
from weights.tiers.codec import Codec
from weights.tiers.objects import Objects
from weights.tiers.pace import Pace
from weights.tiers.packer import Packer
from weights.tiers.record import AUX, HEADER, TENSOR, Name, Part, Record, object_key
from weights.tiers.records import Records

OWNER_KEY = "owner"


@dataclass(frozen=True)
class Packed:
    """A finished put: bytes of the version, bytes new to the tier, bytes written, and the seconds."""

    nbytes: int
    new_bytes: int
    written_bytes: int
    seconds: float


class PackedTier:
    """`codec_of` chooses a tensor's codec by kind and spec: "raw" or "zstd", or a moment codec for float32 tensors.

    Errors of the object store propagate: TierFull, TierUnavailable.
    """

    def __init__(
        self,
        name: str,
        objects: Objects,
        *,
        level: int = 1,
        codec_of: Callable[[str, TensorSpec], Codec] = lambda kind, spec: "zstd",
    ) -> None:
        self.name = name
        self.where = objects.where
        self._objects = objects
        self._level = level
        self._codec_of = codec_of
        self._records = Records(name, objects)

    def names(self, kind: str) -> Mapping[Name, float]:
        """Creation time (Unix seconds) by name of everything readable. It logs and skips a damaged record."""
        return {name: record.manifest.created_s for name, record in self._records.all().items() if name.kind == kind}

    def usage_bytes(self) -> int:
        """Stored bytes of all objects that records need."""
        return sum(self._records.objects().values())

    def claim(self, owner: str, first: bool) -> None:
        """Checks that the tier belongs to `owner`; claims it if it has no owner and this is the `first` time.

        Raises TierUnavailable otherwise: a lost mount leaves an empty directory, and two boxes in one place would
        remove each other's objects.
        """
        if self._objects.size(OWNER_KEY) is None:
            if not first:
                raise TierUnavailable(f"{self.where} is not what this box wrote to: it is empty; is it mounted?")
            self._objects.put(OWNER_KEY, owner.encode())
        found = self._objects.get(OWNER_KEY).decode(errors="replace")
        if found != owner:
            raise TierUnavailable(
                f"{self.where} belongs to box {found[:40]!r}, this is {owner!r}; give each box a place of its own, or "
                f"delete {OWNER_KEY} there to take it over"
            )

    def put(self, source: Path, *, pace: Pace | None = None) -> Packed:
        """Writes the version directory `source`, which must not change meanwhile (in shared memory: lease it).

        It skips what the tier already has, including data of an interrupted put, and compares the source's bytes with
        its checksums if it has them. Raises IntegrityError if they differ, and then writes no record.
        """
        started_s, pace = time.monotonic(), pace or Pace()
        manifest, layout = Manifest.read(source), Layout.read(source)
        manifest.check_layout(layout, path=source)
        digests = {
            placed.spec.name: manifest.tensors[placed.spec.name].checksum or tensor_checksum(source, placed)
            for placed in layout
        }
        known, sizes = self._records.parts_by_checksum(), self._records.objects()
        pieces: dict[str, tuple[Part, ...]] = {}
        packer = Packer(self._level, partial(self._store, pace=pace), pieces)
        for file in layout.files:
            packer.add(HEADER + file.name, 1, [file.header])
        for name, found in manifest.aux_files.items():
            if name.endswith(INDEX_SUFFIX):
                continue  # made again from the layout
            with open_regular(source, name) as opened:
                data = opened.readall()
            if checksum(data) != found.checksum:
                raise ChecksumMismatch("the bytes differ from the manifest", path=source, file=name)
            packer.add(AUX + name, 1, [data])
        lossy, written = {}, {}
        for placed in sorted(layout, key=_width, reverse=True):  # objects hold elements of one width
            name, width = placed.spec.name, _width(placed)
            chosen = self._codec_of(manifest.kind, placed.spec)
            if chosen in ("moment", "second_moment"):
                lossy[name] = packer.add_lossy(
                    TENSOR + name, b"".join(tensor_chunks(source, placed, Running())), chosen
                )
            elif (parts := known.get(digests[name])) is not None and self._still_there(parts, sizes):
                pieces[TENSOR + name] = parts
            else:
                running = Running()
                packer.add(TENSOR + name, width, tensor_chunks(source, placed, running), chosen)
                written[name] = running.text()
        packer.flush()
        compare(written, {name: digests[name] for name in written}, layout, path=source)
        meta = {**manifest.meta, "quantised": sorted(lossy)} if lossy else manifest.meta
        used = {part.object for parts in pieces.values() for part in parts}
        objects = {key: packer.sizes.get(key) or sizes[key] for key in used}
        self._records.put(Record(replace(manifest.with_checksums(digests | lossy), meta=meta), pieces, objects))
        new_bytes = sum(layout.find(name).nbytes for name in (*written, *lossy))
        return Packed(manifest.nbytes, new_bytes, pace.done_bytes, time.monotonic() - started_s)

    def copy_from(self, other: PackedTier, name: Name, *, pace: Pace | None = None) -> Packed:
        """Copies `name` from `other`, object by object. Raises the errors of `restore` and `put`."""
        started_s, pace = time.monotonic(), pace or Pace()
        record = other._records.find(name)
        for key, nbytes in record.objects.items():
            if self._objects.size(object_key(key)) != nbytes:
                self._store(key, other._fetch(key), pace=pace)
        self._records.put(record)
        return Packed(record.manifest.nbytes, pace.done_bytes, pace.done_bytes, time.monotonic() - started_s)

    def _store(self, key: str, blob: bytes, *, pace: Pace) -> None:
        if self._objects.size(object_key(key)) != len(blob):
            self._objects.put(object_key(key), blob)
            pace.moved(len(blob))

    def _still_there(self, parts: tuple[Part, ...], sizes: Mapping[str, int]) -> bool:
        return all(self._objects.size(object_key(part.object)) == sizes[part.object] for part in parts)

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if the tier has none, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        record = self._records.find(name)
        small = self._gather(record, (HEADER, AUX))
        layout = _layout(record, small)
        aux = {key[len(AUX) :]: data for key, data in small.items() if key.startswith(AUX)}
        with store.reserve(layout, kind=name.kind, model=name.model, version=name.version, aux_files=aux) as draft:
            for piece, offset, data in self._tensor_parts(record):
                target = draft.view(piece[len(TENSOR) :])
                if offset + len(data) > len(target):
                    raise ObjectDamaged(f"the record gives {piece} more bytes than it has", path=name.key)
                target[offset : offset + len(data)] = data
                del target
            checksums = {tensor: found.checksum for tensor, found in record.manifest.tensors.items()}
            return draft.commit(
                meta=record.manifest.meta, pinned=False, expected_checksums=checksums, source=self.where
            )

    def verify(self, name: Name) -> Manifest:
        """Reads every byte of `name` and compares it. Raises VersionNotFound, IntegrityError."""
        record = self._records.find(name)
        _layout(record, self._gather(record, (HEADER, AUX)))
        running = {tensor: (Running(), 0) for tensor in record.manifest.tensors}
        waiting: dict[str, dict[int, bytes]] = {}
        for piece, offset, data in self._tensor_parts(record):
            tensor = piece[len(TENSOR) :]
            waiting.setdefault(tensor, {})[offset] = bytes(data)
            digest, position = running[tensor]
            while (chunk := waiting[tensor].pop(position, None)) is not None and chunk:
                digest.update(chunk)
                position += len(chunk)
            running[tensor] = digest, position
        for tensor, (digest, _) in running.items():
            if record.manifest.tensors[tensor].checksum != digest.text():
                raise ChecksumMismatch("the bytes differ from the manifest", path=self.where, tensor=tensor)
        return record.manifest

    def _fetch(self, key: str) -> bytes:
        blob = self._objects.get(object_key(key))
        if blake3(blob).hexdigest() != key:
            raise ObjectDamaged("its bytes are not those of its name", path=f"{self.where}/{object_key(key)}")
        return blob

    def _decoded(self, key: str) -> bytes | memoryview:
        return codec.decode(self._fetch(key), name=f"{self.where}/{object_key(key)}")

    def _gather(self, record: Record, kinds: tuple[str, ...]) -> dict[str, bytes]:
        objects: dict[str, bytes | memoryview] = {}
        gathered = {}
        for piece, parts in record.pieces.items():
            if piece.startswith(kinds):
                for part in parts:
                    objects.setdefault(part.object, self._decoded(part.object))
                gathered[piece] = b"".join(objects[p.object][p.offset : p.offset + p.nbytes] for p in parts)
        return gathered

    def _tensor_parts(self, record: Record) -> Iterator[tuple[str, int, memoryview]]:
        """(piece, offset in the piece, bytes), each object fetched once."""
        by_object: dict[str, list[tuple[str, int, Part]]] = {}
        for piece, parts in record.pieces.items():
            position = 0
            for part in parts:
                if piece.startswith(TENSOR):
                    by_object.setdefault(part.object, []).append((piece, position, part))
                position += part.nbytes
        for key, wanted in by_object.items():
            data = memoryview(self._decoded(key))
            for piece, position, part in wanted:
                chunk = data[part.offset : part.offset + part.nbytes]
                if len(chunk) != part.nbytes:
                    raise ObjectDamaged(f"it is too short for {piece}", path=f"{self.where}/{object_key(key)}")
                yield piece, position, chunk

    def remove(self, name: Name) -> None:
        """Removes `name`; the next `collect` frees its bytes. Idempotent."""
        self._records.remove(name)

    def quarantine(self, name: Name) -> None:
        """Removes `name`, its damaged objects, and all records that use one of those, so that no later write references
        them."""
        try:
            objects = self._records.find(name).objects
        except (IntegrityError, VersionNotFound):
            objects = {}
        bad = set()
        for key in objects:
            try:
                self._fetch(key)
            except IntegrityError:
                bad.add(key)
        for other, record in self._records.all().items():
            if not bad.isdisjoint(record.objects):
                self.remove(other)
        self.remove(name)
        for key in bad:
            self._objects.delete(object_key(key))

    def collect(self) -> int:
        """Removes the objects that no record needs, those of removed versions and of abandoned puts; returns their
        bytes. Do not call it before an interrupted put resumes: that put would send its objects again."""
        self._objects.sweep()
        needed = {object_key(key) for record in self._records.all(strict=True).values() for key in record.objects}
        freed = 0
        for key, nbytes in list(self._objects.list("objects/")):
            if key not in needed:
                self._objects.delete(key)
                freed += nbytes
        return freed


def _layout(record: Record, small: Mapping[str, bytes]) -> Layout:
    manifest, path = record.manifest, record.name.key
    files = []
    for name, found in manifest.files.items():
        header = small.get(HEADER + name)
        if header is None:
            raise HeaderInvalid("the header is missing from the record", path=path, file=name)
        tensors = parse_header(header, path=path, file=name, file_bytes=found.nbytes)
        files.append(FileLayout(name, header, tuple(Placed(spec, name, start, end) for spec, start, end in tensors)))
    layout = Layout(tuple(files))
    manifest.check_layout(layout, path=path)
    for name, found in manifest.aux_files.items():
        if not name.endswith(INDEX_SUFFIX) and checksum(small.get(AUX + name, b"")) != found.checksum:
            raise ChecksumMismatch("the bytes differ from the manifest", path=path, file=name)
    if {key[len(TENSOR) :] for key in record.pieces if key.startswith(TENSOR)} != set(manifest.tensors):
        raise ObjectDamaged("the record and its manifest name different tensors", path=path)
    return layout


def _width(placed: Placed) -> int:
    return max(1, DTYPE_BITS[placed.spec.dtype] // 8)


def moment_codecs(kind: str, spec: TensorSpec) -> Codec:
    """`codec_of` that quantises the Adam moments of snapshots: one byte per element, one scale per 256."""
    if kind == "snapshot" and spec.dtype == "F32":
        if re.match(r"exp_avg_sq\.", spec.name):
            return "second_moment"
        if re.match(r"exp_avg\.", spec.name):
            return "moment"
    return "zstd"
