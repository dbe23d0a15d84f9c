"""Keeps versions and snapshots on the local disk as plain directories, which training maps and every tool can read."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from weights.format.errors import IntegrityError, TierFull, VersionNotFound
from weights.format.files import sync
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE, decode_name, encode_name
from weights.memory.evictor import directories
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers import copies
from weights.tiers.copies import Moved
from weights.tiers.objects import tier_errors
from weights.tiers.record import Name

STAGING = ".staging"


class DirectoryTier:
    """`<models>/<model>/<version>/` and `<snapshots>/<job>/<step>/` with a sealed manifest each.

    The same verbs as `weights.tiers.remote.RemoteTier`. It leaves `free_bytes` of the file system free.
    """

    def __init__(self, models: Path, snapshots: Path | None = None, *, free_bytes: int = 0) -> None:
        self.where = str(models.parent)
        self._models, self._snapshots = models, snapshots or models.with_name("snapshots")
        self._free_bytes = free_bytes
        self._read: dict[Path, tuple[int, Manifest]] = {}

    def path(self, name: Name) -> Path:
        """Path of a version, whether it exists or not. Raises InvalidName."""
        root = self._snapshots if name.kind == "snapshot" else self._models
        return root / encode_name(name.model) / encode_name(name.version)

    def names(self) -> dict[Name, float]:
        """Creation time (Unix seconds) by name, of every version with a readable manifest."""
        return {name: manifest.created_s for name, manifest in self._manifests().items()}

    def usage_bytes(self) -> int:
        return sum(manifest.nbytes for manifest in self._manifests().values())

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Copies the version in shared memory at `source`, in place of what is there under its name. Raises TierFull,
        TierUnavailable, IntegrityError."""
        stored = StoredVersion.read(source)
        name = Name(stored.kind, stored.model, stored.version)
        target = self.path(name)
        with tier_errors(target):
            partial = self._staged(target, "copy")
            free = shutil.disk_usage(partial.parent).free
            if free - stored.nbytes < self._free_bytes:
                raise TierFull(
                    f"{self.where} has {free} bytes free and must keep {self._free_bytes}: {stored.nbytes} more do not "
                    "fit; free some, or keep fewer versions and snapshots"
                )
            try:
                copies.persist(stored, partial, moved)
                self.remove(name)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(partial, target)
                sync(target.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Raises VersionNotFound, IntegrityError, StoreFull, VersionExists."""
        return copies.restore(store, self._there(name))

    def verify(self, name: Name) -> Manifest:
        """Reads every byte. Raises VersionNotFound, IntegrityError."""
        return copies.verify(self._there(name))

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

    def _manifests(self) -> dict[Name, Manifest]:
        found = {}
        families = [*directories(self._models), *directories(self._snapshots)]
        for path in (path for family in families for path in directories(family)):
            model, version = decode_name(path.parent.name), decode_name(path.name)
            if model is None or version is None:
                continue  # .staging, .downloads
            with suppress(FileNotFoundError, IntegrityError):
                changed_ns = os.stat(path / MANIFEST_FILE, follow_symlinks=False).st_mtime_ns
                if self._read.get(path, (0,))[0] != changed_ns:
                    self._read[path] = changed_ns, Manifest.read(path)
                manifest = self._read[path][1]
                found[Name(manifest.kind, model, version)] = manifest
        self._read = {path: known for path, known in self._read.items() if path.exists()}
        return found
