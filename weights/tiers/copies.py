"""Copies versions to disk byte for byte, restores them, and verifies the copies.

A copy is written beside its destination, checked, synced and renamed, so an existing destination is complete. It
proceeds in chunks at a limited rate, to stay in the background, and drops its data from the page cache, which serving
needs more.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.format.checksums import Running, checksum, compare
from weights.format.errors import ChecksumMismatch, IntegrityError, InvalidName, NotSealed, TierExists
from weights.format.files import open_regular, sync, write_file
from weights.format.layout import Layout
from weights.format.manifest import FileRecord, Manifest
from weights.format.names import MANIFEST_FILE
from weights.format.source import check_aux, read_source, tensor_checksum
from weights.memory.lease import Lease, StoredVersion, take_lease, unpin
from weights.memory.locks import DirectoryLock
from weights.memory.removal import dismantle, dismantle_unheld
from weights.memory.store import WeightStore
from weights.tiers.pace import Pace

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class TierCopy:
    """A finished copy: its directory, the bytes written (0 if it already existed), the seconds it took."""

    path: Path
    nbytes: int
    seconds: float
    manifest: Manifest


def persist(stored: StoredVersion, dst_dir: Path | str, *, pace: Pace | None = None) -> TierCopy:
    """Copies `stored` to the new directory `dst_dir`, durably; then unpins it, so that eviction may take it.

    The copy is sealed: this computes checksums while copying, and compares those that the version had. It
    appears by a rename after everything is on the medium; after a crash only a hidden
    `.<name>.partial-*` sibling is left, which the next call removes. If `dst_dir` already holds this very version (a
    crash came between the rename and the unpinning), nothing is copied. Raises TierExists if it holds anything else,
    ChecksumMismatch, VersionNotFound, OSError (disk full: nothing is left behind).
    """
    dst_dir = Path(dst_dir)
    started_s = time.monotonic()
    if dst_dir.exists():
        copy = _already_there(stored, dst_dir)
        unpin(stored)
        return copy
    dst_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_partials(dst_dir)
    with take_lease(stored) as lease:
        partial = dst_dir.parent / f".{dst_dir.name}.partial-{uuid.uuid4().hex}"
        partial.mkdir(mode=0o700)
        lock = DirectoryLock.try_shared(partial)
        assert lock is not None
        try:
            manifest = _write_copy(lease, lock.fd, pace or Pace())
            os.rename(partial, dst_dir)
        except BaseException as error:
            dismantle(partial, None)
            if isinstance(error, OSError) and dst_dir.exists():
                raise TierExists(f"{dst_dir} was made by another writer meanwhile") from error
            raise
        finally:
            lock.close()
    sync(dst_dir.parent)
    unpin(stored)
    return TierCopy(dst_dir, manifest.nbytes, time.monotonic() - started_s, manifest)


def restore(store: WeightStore, src_dir: Path | str) -> StoredVersion:
    """Restores a persisted version into `store` under the name in its manifest.

    Raises IntegrityError before anything is visible if the copy is damaged, else as `WeightStore.import_dir`.
    """
    manifest = Manifest.read(Path(src_dir))
    if not manifest.sealed:
        raise NotSealed("the copy has no checksums to be verified by", path=src_dir, file=MANIFEST_FILE)
    return store.import_dir(src_dir, model=manifest.model, version=manifest.version, kind=manifest.kind)


def verify(directory: Path | str) -> Manifest:
    """Reads every byte of a version directory, in any tier, and compares it with the manifest.

    Returns the manifest. Raises IntegrityError naming file and tensor; NotSealed without checksums.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if not manifest.sealed:
        raise NotSealed("checksums were never recorded", path=directory, file=MANIFEST_FILE)
    layout = Layout.read(directory)
    manifest.check_layout(layout, path=directory)
    digests = _checksums_of(directory, layout)
    compare(digests, {name: record.checksum for name, record in manifest.tensors.items()}, layout, path=directory)
    aux_files = {}
    for name in manifest.aux_files:
        with open_regular(directory, name) as file:
            aux_files[name] = file.readall()
    check_aux(manifest, aux_files, path=directory)
    return manifest


def seal_dir(
    directory: Path | str, *, kind: str, model: str, version: str, meta: Mapping[str, Any] | None = None
) -> Manifest:
    """Writes a manifest with checksums for a foreign checkpoint directory, such as a download, atomically.

    Raises IntegrityError or InvalidLayout if the directory is not a valid checkpoint.
    """
    directory = Path(directory)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    source = read_source(directory)
    manifest = Manifest.describe(
        source.layout,
        kind=kind,
        model=model,
        version=version,
        created_s=time.time(),
        meta=meta or {},
        aux_files={name: FileRecord(len(data), checksum(data)) for name, data in source.aux_files.items()},
        checksums=_checksums_of(directory, source.layout),
    )
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temporary = f".{MANIFEST_FILE}.{uuid.uuid4().hex}"
        write_file(fd, temporary, manifest.to_bytes())
        os.rename(temporary, MANIFEST_FILE, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)
    sync(directory)
    return manifest


def _already_there(stored: StoredVersion, dst_dir: Path) -> TierCopy:
    taken = f"{dst_dir} exists and is not this version; a copy is never written over another one"
    try:
        there = Manifest.read(dst_dir)
        there.check_layout(Layout.read(dst_dir), path=dst_dir)
    except IntegrityError as error:
        raise TierExists(taken) from error
    if there.identity != stored.manifest.identity:
        raise TierExists(taken)
    return TierCopy(dst_dir, 0, 0.0, there)


def _write_copy(lease: Lease, partial_fd: int, pace: Pace) -> Manifest:
    digests: dict[str, str] = {}
    for file in lease.layout.files:
        fd = os.open(
            file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=partial_fd
        )
        with os.fdopen(fd, "wb", buffering=0) as out:
            os.posix_fallocate(fd, 0, file.nbytes)
            _write_all(fd, memoryview(file.header))
            pace.moved(len(file.header))
            for placed in file.tensors:
                running, view = Running(), lease.view(placed.spec.name)
                for start in range(0, placed.nbytes, CHUNK_BYTES):
                    chunk = view[start : start + CHUNK_BYTES]
                    running.update(chunk)
                    _write_all(fd, chunk)
                    pace.moved(len(chunk))
                digests[placed.spec.name] = running.text()
            out.flush()
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    expected = {name: record.checksum for name, record in lease.manifest.tensors.items()}
    compare(digests, expected, lease.layout, path=lease.path)
    for name, record in lease.manifest.aux_files.items():
        with open_regular(lease.path, name) as aux:
            data = aux.readall()
        if checksum(data) != record.checksum:
            raise ChecksumMismatch("the bytes differ from the manifest", path=lease.path, file=name)
        write_file(partial_fd, name, data, durable=True)
        pace.moved(len(data))
    manifest = lease.manifest.with_checksums(digests)
    write_file(partial_fd, MANIFEST_FILE, manifest.to_bytes(), durable=True)
    os.fsync(partial_fd)
    return manifest


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _checksums_of(directory: Path, layout: Layout) -> dict[str, str]:
    return {placed.spec.name: tensor_checksum(directory, placed) for placed in layout}


def remove_partials(dst_dir: Path) -> None:
    """Removes incomplete copies of `dst_dir` that no live process holds."""
    for path in dst_dir.parent.glob(f".{_escape(dst_dir.name)}.partial-*"):
        dismantle_unheld(path)


def _escape(name: str) -> str:
    if not name or name.startswith("."):
        raise InvalidName(f"a copy needs a plain, visible directory name, got {name!r}")
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
