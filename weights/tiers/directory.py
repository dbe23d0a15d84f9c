"""Keeps versions and snapshots on the local disk as plain directories, which training maps and every tool can read."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from weights.format.errors import IntegrityError, NotSealed, TierFull, VersionNotFound
from weights.format.files import replace_file, sync
from weights.format.layout import Layout
from weights.format.manifest import Chunks, Manifest, aux_files_of, chunks_of, read_whole
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE, Name, encode_name
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore, directories
from weights.tiers.objects import tier_errors
from weights.tiers.tier import Tier

STAGING = ".staging"


class DirectoryTier(Tier):
    """`<models>/<model>/<version>/` and `<snapshots>/<job>/<step>/` with a sealed manifest each. Leaves `free_bytes` of
    the file system free."""

    def __init__(self, models: Path, snapshots: Path | None = None, *, free_bytes: int = 0) -> None:
        self.where = str(models.parent)
        self._models, self._snapshots = models, snapshots or models.with_name("snapshots")
        self._free_bytes = free_bytes

    def path(self, name: Name) -> Path:
        """Path of a version, whether it exists or not. Raises InvalidName."""
        root = self._snapshots if name.kind == "snapshot" else self._models
        return root / encode_name(name.model) / encode_name(name.version)

    def place(self, name: Name) -> str:
        return str(self.path(name))

    def manifests(self) -> dict[Name, Manifest]:
        manifests = {}
        families = (family for root in (self._models, self._snapshots) for family in directories(root))
        for folder in (folder for family in families for folder in directories(family)):
            with suppress(IntegrityError):
                manifest = Manifest.read(folder)
                if self.path(name := manifest.name) == folder:  # not one that is being copied or removed
                    manifests[name] = manifest
        return manifests

    def remove(self, name: Name) -> bool:
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
        for root in (self._models, self._snapshots):
            for path in (root / STAGING).glob("*-*"):
                if path.name.startswith(("copy-", "removed-")):
                    shutil.rmtree(path, ignore_errors=True)

    def _manifest(self, name: Name) -> Manifest:
        if not (path := self.path(name)).is_dir():
            raise VersionNotFound(f"{name} is not on disk")
        return _sealed(path)

    def _chunks(self, name: Name, file: str) -> Iterator[bytes]:
        path = self.path(name)
        return chunks_of(path, Manifest.read(path), file)

    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, sealed: Callable[[], Manifest]) -> None:
        target = self.path(name := manifest.name)
        with tier_errors(target):
            partial = self._staged(target, "copy")
            free = shutil.disk_usage(partial.parent).free
            if free - manifest.nbytes < self._free_bytes:
                raise TierFull(
                    f"{self.where} has {free} bytes free and must keep {self._free_bytes}: {manifest.nbytes} more do "
                    "not fit; free some, or keep fewer versions and snapshots"
                )
            try:
                partial.mkdir(mode=0o700)
                for file in manifest.files:
                    _write_out(partial / file, chunks(file))
                replace_file(partial, MANIFEST_FILE, sealed().to_bytes())
                self.remove(name)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(partial, target)
                sync(target.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def _staged(self, path: Path, purpose: str) -> Path:
        # The model library's sweep reads the process id from the name.
        staging = path.parent.parent / STAGING
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        return staging / f"{purpose}-{os.getpid()}-{uuid.uuid4().hex}"


def verify(directory: Path) -> Manifest:
    """Reads every byte of a version directory and compares it with the manifest, which is returned. Raises
    IntegrityError naming the file; NotSealed without checksums."""
    manifest = _sealed(directory)
    return read_whole(manifest, partial(chunks_of, directory, manifest), source=directory)


def take_in(store: WeightStore, directory: Path, *, pinned: bool = False) -> StoredVersion:
    """The version directory, copied into `store` under the name in its manifest. Raises as `WeightStore.receive`."""
    manifest = Manifest.read(directory)
    return store.receive(manifest, partial(chunks_of, directory, manifest), source=directory, pinned=pinned)


def seal_dir(
    directory: Path, *, kind: str, model: str, version: str, meta: Mapping[str, Any] | None = None
) -> Manifest:
    """Writes a manifest with checksums for a foreign checkpoint directory, such as a download, atomically, and the
    index of several files where it is missing.

    Raises IntegrityError or InvalidLayout if the directory is not a valid checkpoint.
    """
    layout, aux = Layout.read(directory), aux_files_of(directory)
    index = layout.index_file()
    if index is not None and not any(name.endswith(INDEX_SUFFIX) for name in aux):
        replace_file(directory, *index)
        aux[index[0]] = index[1]
    manifest = Manifest.describe(layout, Name(kind, model, version), meta=meta or {}, aux_files=aux)
    manifest = read_whole(manifest, partial(chunks_of, directory, manifest), source=directory)
    replace_file(directory, MANIFEST_FILE, manifest.to_bytes())
    return manifest


def _write_out(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes a new file durably, and drops it from the page cache, which serving needs more."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sealed(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    if not manifest.sealed:
        raise NotSealed("checksums were never recorded", path=directory, file=MANIFEST_FILE)
    return manifest
