"""Copies versions to disk byte for byte, restores them, and verifies the copies.

A copy drops its data from the page cache, which serving needs more.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weights.format.checksums import Running, checksum, compare
from weights.format.errors import NotSealed
from weights.format.files import open_regular, sync, write_file
from weights.format.layout import Layout
from weights.format.manifest import FileRecord, Manifest
from weights.format.names import MANIFEST_FILE
from weights.format.source import check_aux, read_source, tensor_checksum, tensor_chunks
from weights.memory.lease import StoredVersion, take_lease
from weights.memory.store import WeightStore

Moved = Callable[[int], object]
"""Called with the bytes of each chunk that was copied; an exception from it aborts the copy."""


def persist(stored: StoredVersion, target: Path, moved: Moved = lambda nbytes: None) -> Manifest:
    """Copies `stored` to the new directory `target`, durably. The caller removes what an error leaves there.

    The copy is sealed: this computes checksums while copying, and compares those that the version had. Raises
    IntegrityError, VersionNotFound, OSError.
    """
    target.mkdir(mode=0o700, parents=True)
    with take_lease(stored) as lease:
        digests: dict[str, str] = {}
        for file in lease.layout.files:
            with open(target / file.name, "xb", buffering=0) as out:
                os.posix_fallocate(out.fileno(), 0, file.nbytes)
                _write_all(out.fileno(), file.header)
                for placed in file.tensors:
                    running = Running()
                    for chunk in tensor_chunks(stored.path, placed, running):
                        _write_all(out.fileno(), chunk)
                        moved(len(chunk))
                    digests[placed.spec.name] = running.text()
                os.fsync(out.fileno())
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        expected = {name: record.checksum for name, record in lease.manifest.tensors.items()}
        compare(digests, expected, lease.layout, path=stored.path)
        aux_files = _read_aux(stored.path, lease.manifest)
        manifest = lease.manifest.with_checksums(digests)
    check_aux(manifest, aux_files, path=stored.path)
    _write_small(target, {**aux_files, MANIFEST_FILE: manifest.to_bytes()})
    return manifest


def restore(store: WeightStore, src_dir: Path | str) -> StoredVersion:
    """Restores a persisted version into `store` under the name in its manifest.

    Raises IntegrityError before anything is visible if the copy is damaged, else as `WeightStore.import_dir`.
    """
    manifest = _sealed(Path(src_dir))
    return store.import_dir(src_dir, model=manifest.model, version=manifest.version, kind=manifest.kind)


def verify(directory: Path | str) -> Manifest:
    """Reads every byte of a version directory, in any tier, and compares it with the manifest.

    Returns the manifest. Raises IntegrityError naming file and tensor; NotSealed without checksums.
    """
    directory = Path(directory)
    manifest, layout = _sealed(directory), Layout.read(directory)
    manifest.check_layout(layout, path=directory)
    digests = {placed.spec.name: tensor_checksum(directory, placed) for placed in layout}
    compare(digests, {name: record.checksum for name, record in manifest.tensors.items()}, layout, path=directory)
    check_aux(manifest, _read_aux(directory, manifest), path=directory)
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
        checksums={placed.spec.name: tensor_checksum(directory, placed) for placed in source.layout},
    )
    temporary = f".{MANIFEST_FILE}.{uuid.uuid4().hex}"
    _write_small(directory, {temporary: manifest.to_bytes()})
    os.rename(directory / temporary, directory / MANIFEST_FILE)
    sync(directory)
    return manifest


def _sealed(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    if not manifest.sealed:
        raise NotSealed("checksums were never recorded", path=directory, file=MANIFEST_FILE)
    return manifest


def _read_aux(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    found = {}
    for name in manifest.aux_files:
        with open_regular(directory, name) as file:
            found[name] = file.readall()
    return found


def _write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name, data in files.items():
            write_file(fd, name, data, durable=True)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
