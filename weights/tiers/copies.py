"""Copies versions to disk byte for byte, restores them, and verifies the copies.

A copy drops its data from the page cache, which serving needs more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weights.format.checksums import checksum
from weights.format.errors import NotSealed
from weights.format.files import replace_file
from weights.format.manifest import FileRecord, Manifest
from weights.format.names import MANIFEST_FILE
from weights.format.source import copy_file, read_source, tensor_checksum, whole
from weights.memory.lease import StoredVersion, take_lease
from weights.memory.store import WeightStore

Moved = Callable[[int], object]
"""Called with the bytes of each chunk that was copied; an exception from it aborts the copy."""


def persist(stored: StoredVersion, target: Path, moved: Moved = lambda nbytes: None) -> Manifest:
    """Copies `stored` to the new directory `target`, durably and sealed. The caller removes what an error leaves there.

    Raises IntegrityError, VersionNotFound, OSError.
    """
    target.mkdir(mode=0o700, parents=True)
    with take_lease(stored):
        manifest = whole(stored.path, moved)
        for name, record in (*manifest.files.items(), *manifest.aux_files.items()):
            fd = copy_file(stored.path, target, name, record.nbytes, moved)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    replace_file(target, MANIFEST_FILE, manifest.to_bytes())
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
    _sealed(Path(directory))
    return whole(Path(directory))


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
    replace_file(directory, MANIFEST_FILE, manifest.to_bytes())
    return manifest


def _sealed(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    if not manifest.sealed:
        raise NotSealed("checksums were never recorded", path=directory, file=MANIFEST_FILE)
    return manifest
