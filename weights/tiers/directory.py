"""Keeps versions and snapshots on the local disk as plain directories, which training maps and every tool can read."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weights.format.checksums import hashed
from weights.format.errors import IntegrityError, NotSealed, TierFull, VersionNotFound
from weights.format.files import replace_file, sync
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE, decode_name, encode_name
from weights.format.source import aux_files_of, chunks_of, whole
from weights.memory.lease import StoredVersion
from weights.memory.space import directories
from weights.memory.store import WeightStore
from weights.tiers.objects import tier_errors
from weights.tiers.record import Name

STAGING = ".staging"
Moved = Callable[[int], object]
"""Called with the bytes of each chunk that was copied; an exception from it aborts the copy."""


class DirectoryTier:
    """`<models>/<model>/<version>/` and `<snapshots>/<job>/<step>/` with a sealed manifest each.

    The same verbs as `weights.tiers.remote.RemoteTier`. It leaves `free_bytes` of the file system free.
    """

    def __init__(self, models: Path, snapshots: Path | None = None, *, free_bytes: int = 0) -> None:
        self.where = str(models.parent)
        self._models, self._snapshots = models, snapshots or models.with_name("snapshots")
        self._free_bytes = free_bytes

    def path(self, name: Name) -> Path:
        """Path of a version, whether it exists or not. Raises InvalidName."""
        root = self._snapshots if name.kind == "snapshot" else self._models
        return root / encode_name(name.model) / encode_name(name.version)

    def manifests(self) -> dict[Name, Manifest]:
        """Every version with a readable manifest."""
        found = {}
        families = [*directories(self._models), *directories(self._snapshots)]
        for path in (path for family in families for path in directories(family)):
            model, version = decode_name(path.parent.name), decode_name(path.name)
            if model is None or version is None:
                continue  # .staging, .downloads
            with suppress(FileNotFoundError, IntegrityError):
                manifest = Manifest.read(path)
                found[Name(manifest.kind, model, version)] = manifest
        return found

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Copies the version directory `source`, which must not change meanwhile (in shared memory: lease it), in place
        of what is there under its name. Raises TierFull, TierUnavailable, IntegrityError if its bytes differ from its
        manifest."""
        manifest = Manifest.read(source)
        name = Name(manifest.kind, manifest.model, manifest.version)
        target = self.path(name)
        with tier_errors(target):
            partial = self._staged(target, "copy")
            free = shutil.disk_usage(partial.parent).free
            if free - manifest.nbytes < self._free_bytes:
                raise TierFull(
                    f"{self.where} has {free} bytes free and must keep {self._free_bytes}: {manifest.nbytes} more do "
                    "not fit; free some, or keep fewer versions and snapshots"
                )
            try:
                _copy(source, manifest, partial, moved)
                self.remove(name)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(partial, target)
                sync(target.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible. Raises
        VersionNotFound, IntegrityError, NotSealed, StoreFull, VersionExists."""
        path = self._there(name)
        _require_sealed(path)
        return take_in(store, path)

    def verify(self, name: Name) -> Manifest:
        """Reads every byte. Raises VersionNotFound, IntegrityError."""
        return verify(self._there(name))

    def remove(self, name: Name) -> bool:
        """Deletes a version; False if there was none. One rename hides it first."""
        path = self.path(name)
        with tier_errors(path):
            hidden = self._staged(path, "removed")
            try:
                os.rename(path, hidden)
            except FileNotFoundError:
                return False
            sync(path.parent)
            shutil.rmtree(hidden)
            with suppress(OSError):  # other versions of the model stay
                path.parent.rmdir()
            return True

    def collect(self) -> None:
        """Removes what a dead process was copying or removing. Call it while nothing is copied."""
        for root in (self._models, self._snapshots):
            for path in (root / STAGING).glob("*-*"):
                if path.name.startswith(("copy-", "removed-")):
                    shutil.rmtree(path, ignore_errors=True)

    def _staged(self, path: Path, what: str) -> Path:
        # The model library's sweep reads the process id from the name.
        staging = path.parent.parent / STAGING
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        return staging / f"{what}-{os.getpid()}-{uuid.uuid4().hex}"

    def _there(self, name: Name) -> Path:
        path = self.path(name)
        if not path.is_dir():
            raise VersionNotFound(f"{name} is not on disk")
        return path


def verify(directory: Path) -> Manifest:
    """Reads every byte of a version directory, in any tier, and compares it with the manifest.

    Returns the manifest. Raises IntegrityError naming the file; NotSealed without checksums.
    """
    return whole(directory, _require_sealed(directory))


def take_in(store: WeightStore, directory: Path, *, pinned: bool = False) -> StoredVersion:
    """The version directory, copied into `store` under the name in its manifest. Raises as `WeightStore.receive`."""
    manifest = Manifest.read(directory)
    sizes = {file: record.nbytes for file, record in manifest.files.items()}
    return store.receive(
        manifest, lambda file: chunks_of(directory, file, sizes[file]), source=directory, pinned=pinned
    )


def seal_dir(
    directory: Path, *, kind: str, model: str, version: str, meta: Mapping[str, Any] | None = None
) -> Manifest:
    """Writes a manifest with checksums for a foreign checkpoint directory, such as a download, atomically, and the
    index of several files where it is missing.

    Raises IntegrityError or InvalidLayout if the directory is not a valid checkpoint.
    """
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    layout, aux = Layout.read(directory), aux_files_of(directory)
    index = layout.index_file()
    if index is not None and not any(name.endswith(INDEX_SUFFIX) for name in aux):
        replace_file(directory, *index)
        aux[index[0]] = index[1]
    manifest = Manifest.describe(layout, kind=kind, model=model, version=version, meta=meta or {}, aux_files=aux)
    manifest = whole(directory, manifest)
    replace_file(directory, MANIFEST_FILE, manifest.to_bytes())
    return manifest


def _copy(source: Path, manifest: Manifest, target: Path, moved: Moved) -> None:
    """Copies the version to the new directory `target`, durably and sealed, in one read that compares its checksums. A
    copy drops its data from the page cache, which serving needs more."""
    target.mkdir(mode=0o700)
    manifest.check_layout(Layout.read(source), path=source)
    found: dict[str, str] = {}
    for name, record in manifest.files.items():
        fd = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            for chunk in hashed(chunks_of(source, name, record.nbytes), record.checksum, found, path=source, file=name):
                out.write(chunk)
                moved(len(chunk))
            out.flush()
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    replace_file(target, MANIFEST_FILE, manifest.with_checksums(found).to_bytes())


def _require_sealed(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    if not manifest.sealed:
        raise NotSealed("checksums were never recorded", path=directory, file=MANIFEST_FILE)
    return manifest
