"""Implements a packed tier: versions and snapshots as compressed objects, on a disk or a remote store.

    records/<kind>s/<model>/<version>            its contents; written last, so a version with a record is complete
    objects/<kind>s/<model>/<version>/<n>-<sum>  up to 32 MiB of its pieces, encoded by `weights.tiers.codec`

The name of an object has the BLAKE3 of its stored bytes: it reveals damage, and an interrupted put sends no object
twice. One process writes a tier; any number may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
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
from weights.format.layout import FileLayout, Layout, Placed
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX
from weights.format.source import tensor_chunks
from weights.memory.draft import Draft
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import codec
from weights.tiers.codec import Codec
from weights.tiers.objects import Objects
from weights.tiers.pace import Pace
from weights.tiers.record import Name, Record

OBJECT_BYTES = 32 << 20
OWNER_KEY = "owner"
HEADER, AUX, TENSOR = "header:", "aux:", "tensor:"
log = logging.getLogger(__name__)


class PackedTier:
    """`int8_moments`: the Adam moments of snapshots become one byte per element and a scale per 256 of them.

    Errors of the object store propagate: TierFull, TierUnavailable.
    """

    def __init__(self, name: str, objects: Objects, *, int8_moments: bool = False) -> None:
        self.name = name
        self.where = objects.where
        self._objects = objects
        self._int8_moments = int8_moments
        self._known: dict[Name, Record] | None = None

    def names(self, kind: str) -> Mapping[Name, float]:
        """Creation time (Unix seconds) by name of everything readable. It logs and skips a damaged record."""
        return {name: record.manifest.created_s for name, record in self._records().items() if name.kind == kind}

    def usage_bytes(self) -> int:
        """Stored bytes of all objects that records need."""
        return sum(record.stored_bytes for record in self._records().values())

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

    def put(self, source: Path, *, pace: Pace | None = None) -> int:
        """Writes the version directory `source`, which must not change meanwhile (in shared memory: lease it), and
        returns the bytes written.

        It skips the objects of an interrupted put, and compares the source's bytes with its checksums if it has them.
        Raises IntegrityError if they differ, and then writes no record.
        """
        pace = pace or Pace()
        manifest, layout = Manifest.read(source), Layout.read(source)
        manifest.check_layout(layout, path=source)
        name = Name(manifest.kind, manifest.model, manifest.version)
        packer = _Packer(self._objects, name.folder, pace)
        for file in layout.files:
            packer.add(HEADER + file.name, [file.header])
        for aux, found in manifest.aux_files.items():
            if aux.endswith(INDEX_SUFFIX):
                continue  # made again from the layout
            with open_regular(source, aux) as opened:
                data = opened.readall()
            if checksum(data) != found.checksum:
                raise ChecksumMismatch("the bytes differ from the manifest", path=source, file=aux)
            packer.add(AUX + aux, [data])
        for placed in sorted(layout, key=lambda placed: (self._codec(manifest.kind, placed), _width(placed))):
            chunks = tensor_chunks(source, placed, Running())
            packer.add(TENSOR + placed.spec.name, chunks, self._codec(manifest.kind, placed), _width(placed))
        packer.flush()
        digests = {piece.removeprefix(TENSOR): running.text() for piece, running in packer.digests.items()}
        lossy = {placed.spec.name for placed in layout if self._codec(manifest.kind, placed) != "zstd"}
        expected = {tensor: record.checksum for tensor, record in manifest.tensors.items() if tensor not in lossy}
        compare({tensor: digests[tensor] for tensor in expected}, expected, layout, path=source)
        if lossy:
            manifest = replace(manifest, meta={**manifest.meta, "quantised": sorted(lossy)})
        self._put(Record(manifest.with_checksums(digests), packer.pieces, packer.objects))
        return pace.done_bytes

    def copy_from(self, other: PackedTier, name: Name, *, pace: Pace | None = None) -> int:
        """Copies `name` from `other`, object by object, and returns the bytes written. Raises the errors of `restore`
        and `put`."""
        pace = pace or Pace()
        record = other._find(name)
        for key, nbytes in record.objects:
            if self._objects.size(name.folder + key) != nbytes:
                self._objects.put(name.folder + key, other._fetch(name, key))
                pace.moved(nbytes)
        self._put(record)
        return pace.done_bytes

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible.

        Raises VersionNotFound if the tier has none, IntegrityError if it is damaged, StoreFull, VersionExists.
        """
        record = self._find(name)
        checksums = {tensor: found.checksum for tensor, found in record.manifest.tensors.items()}
        small: dict[str, bytearray] = {piece: bytearray() for piece, _ in record.pieces if not piece.startswith(TENSOR)}
        draft: Draft | None = None
        with ExitStack() as opened:
            for piece, offset, data in self._bytes(record):
                if piece in small:
                    small[piece] += data
                    continue
                if draft is None:  # headers and auxiliary files come first
                    layout = _layout(record, small)
                    aux = {key.removeprefix(AUX): bytes(data) for key, data in small.items() if key.startswith(AUX)}
                    draft = opened.enter_context(store.reserve(layout, **name._asdict(), aux_files=aux))
                view = draft.view(piece.removeprefix(TENSOR))
                if offset + len(data) > len(view):
                    raise ObjectDamaged(f"the record gives {piece} more bytes than it has", path=name.key)
                view[offset : offset + len(data)] = data
                del view
            if draft is None:
                raise ObjectDamaged("it has no tensors", path=name.key)
            meta = record.manifest.meta
            return draft.commit(meta=meta, pinned=False, expected_checksums=checksums, source=self.where)

    def verify(self, name: Name) -> Manifest:
        """Reads every byte of `name` and compares it. Raises VersionNotFound, IntegrityError."""
        record = self._find(name)
        small: dict[str, bytearray] = {piece: bytearray() for piece, _ in record.pieces if not piece.startswith(TENSOR)}
        digests = {piece: Running() for piece, _ in record.pieces if piece.startswith(TENSOR)}
        for piece, _, data in self._bytes(record):
            if piece in small:
                small[piece] += data
            else:
                digests[piece].update(data)
        layout = _layout(record, small)
        found = {piece.removeprefix(TENSOR): running.text() for piece, running in digests.items()}
        expected = {tensor: known.checksum for tensor, known in record.manifest.tensors.items()}
        compare(found, expected, layout, path=self.where)
        return record.manifest

    def remove(self, name: Name) -> None:
        """Removes `name`, its record first. Idempotent."""
        self._objects.delete(name.key)
        self._records().pop(name, None)
        for key, _ in list(self._objects.list(name.folder)):
            self._objects.delete(key)

    quarantine = remove

    def collect(self) -> None:
        """Removes objects without a record, of abandoned puts and interrupted removals. Do not call it before an
        interrupted put resumes: that put would send its objects again."""
        self._objects.sweep()
        folders = tuple(f"objects/{key.removeprefix('records/')}/" for key, _ in self._objects.list("records/"))
        for key, _ in list(self._objects.list("objects/")):
            if not key.startswith(folders):
                self._objects.delete(key)

    def _codec(self, kind: str, placed: Placed) -> Codec:
        if self._int8_moments and kind == "snapshot" and placed.spec.dtype == "F32":
            if placed.spec.name.startswith("exp_avg_sq."):
                return "second_moment"
            if placed.spec.name.startswith("exp_avg."):
                return "moment"
        return "zstd"

    def _find(self, name: Name) -> Record:
        if self._objects.size(name.key) is None:
            raise VersionNotFound(f"{name} is not in the {self.name} tier")
        return self._read(name.key)

    def _read(self, key: str) -> Record:
        record = Record.from_bytes(self._objects.get(key), path=f"{self.where}/{key}")
        if record.name.key != key:
            raise ObjectDamaged(f"it is the record of {record.name}", path=f"{self.where}/{key}")
        return record

    def _records(self) -> dict[Name, Record]:
        """What the tier had when it was first read, and what this process has put and removed since."""
        if self._known is None:
            known = {}
            for key, _ in list(self._objects.list("records/")):
                try:
                    record = self._read(key)
                    known[record.name] = record
                except IntegrityError as error:
                    log.error("the %s tier has a damaged record: %s", self.name, error)
            self._known = known
        return self._known

    def _put(self, record: Record) -> None:
        self._objects.put(record.name.key, record.to_bytes())
        self._records()[record.name] = record
        needed = {record.name.folder + key for key, _ in record.objects}
        for key, _ in list(self._objects.list(record.name.folder)):
            if key not in needed:
                self._objects.delete(key)

    def _fetch(self, name: Name, key: str) -> bytes:
        blob = self._objects.get(name.folder + key)
        if blake3(blob).hexdigest() != key.partition("-")[2]:
            raise ObjectDamaged("its bytes are not those of its name", path=f"{self.where}/{name.folder}{key}")
        return blob

    def _bytes(self, record: Record) -> Iterator[tuple[str, int, memoryview]]:
        """(piece, offset in it, bytes) of all pieces in order. Raises ObjectDamaged unless there are exactly these."""
        pieces, offset = iter(record.pieces), 0
        piece, nbytes = next(pieces, ("", 0))
        for key, _ in record.objects:
            path = f"{self.where}/{record.name.folder}{key}"
            data = memoryview(codec.decode(self._fetch(record.name, key), name=path))
            while data:
                while offset == nbytes:
                    piece, nbytes = next(pieces, ("", -1))
                    offset = 0
                if nbytes < 0:
                    raise ObjectDamaged("it has bytes of no piece", path=path)
                taken = data[: nbytes - offset]
                yield piece, offset, taken
                offset += len(taken)
                data = data[len(taken) :]
        if offset < nbytes or any(left for _, left in pieces):
            raise ObjectDamaged("bytes are missing", path=record.name.key)


class _Packer:
    """Fills objects with pieces of one codec and element width. `digests`: of the decoded bytes of each tensor."""

    def __init__(self, objects: Objects, folder: str, pace: Pace) -> None:
        self._store, self._folder, self._pace = objects, folder, pace
        self._there = dict(objects.list(folder))
        self.pieces: list[tuple[str, int]] = []
        self.objects: list[tuple[str, int]] = []
        self.digests: dict[str, Running] = {}
        self._kind: tuple[Codec, int] = ("zstd", 1)
        self._filled = bytearray()
        self._parts: list[tuple[str, int]] = []  # of what is filled: (piece, bytes)

    def add(self, piece: str, chunks: Iterable[bytes], chosen: Codec = "zstd", width: int = 1) -> None:
        if self._kind != (chosen, width):
            self.flush()
            self._kind = chosen, width
        nbytes = 0
        if piece.startswith(TENSOR):
            self.digests[piece] = Running()
        for chunk in chunks:
            view = memoryview(chunk)
            nbytes += len(view)
            while view:
                taken = view[: OBJECT_BYTES - len(self._filled)]
                self._filled += taken
                self._parts.append((piece, len(taken)))
                view = view[len(taken) :]
                if len(self._filled) == OBJECT_BYTES:
                    self.flush()
        self.pieces.append((piece, nbytes))

    def flush(self) -> None:
        if not self._filled:
            return
        chosen, width = self._kind
        blob = codec.encode(self._filled, codec=chosen, width=width)
        key = f"{len(self.objects):05}-{blake3(blob).hexdigest()}"
        if self._there.get(self._folder + key) != len(blob):
            self._store.put(self._folder + key, blob)
            self._pace.moved(len(blob))
        self.objects.append((key, len(blob)))
        decoded = memoryview(self._filled if chosen == "zstd" else codec.decode(blob, name=key))
        for piece, nbytes in self._parts:
            if piece in self.digests:
                self.digests[piece].update(decoded[:nbytes])
            decoded = decoded[nbytes:]
        self._filled, self._parts = bytearray(), []


def _layout(record: Record, small: Mapping[str, bytes | bytearray]) -> Layout:
    manifest, path = record.manifest, record.name.key
    files = []
    for name, found in manifest.files.items():
        header = small.get(HEADER + name)
        if header is None:
            raise HeaderInvalid("the header is missing from the record", path=path, file=name)
        tensors = parse_header(bytes(header), path=path, file=name, file_bytes=found.nbytes)
        placed = tuple(Placed(spec, name, start, end) for spec, start, end in tensors)
        files.append(FileLayout(name, bytes(header), placed))
    layout = Layout(tuple(files))
    manifest.check_layout(layout, path=path)
    for name, found in manifest.aux_files.items():
        if not name.endswith(INDEX_SUFFIX) and checksum(bytes(small.get(AUX + name, b""))) != found.checksum:
            raise ChecksumMismatch("the bytes differ from the manifest", path=path, file=name)
    if {key.removeprefix(TENSOR) for key, _ in record.pieces if key.startswith(TENSOR)} != set(manifest.tensors):
        raise ObjectDamaged("the record and its manifest name different tensors", path=path)
    return layout


def _width(placed: Placed) -> int:
    return max(1, DTYPE_BITS[placed.spec.dtype] // 8)
