"""Stores versions on the local disk as plain checkpoint directories, which training maps and every tool can read."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from weights.format.errors import IntegrityError, InvalidLayout, TierExists, VersionNotFound
from weights.format.files import sync
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE, decode_name, encode_name
from weights.memory.lease import StoredVersion
from weights.memory.space import directories
from weights.memory.store import WeightStore
from weights.tiers import copies
from weights.tiers.objects import require_space, tier_errors
from weights.tiers.pace import Pace
from weights.tiers.record import Name

STAGING = ".staging"


class DirectoryTier:
    """`<root>/<model>/<version>/` with a sealed manifest each; the same verbs as `weights.tiers.packed.PackedTier`.

    It leaves `free_bytes` of the file system free. Holds only versions.
    """

    def __init__(self, name: str, root: Path, *, free_bytes: int = 0) -> None:
        self.name = name
        self.where = str(root)
        self._root = root
        self._free_bytes = free_bytes
        self._read: dict[Path, tuple[int, Manifest]] = {}

    def path(self, name: Name) -> Path:
        """Path of a version, whether it exists or not. Raises InvalidName."""
        return self._root / encode_name(name.model) / encode_name(name.version)

    def names(self, kind: str) -> Mapping[Name, float]:
        """Creation time (Unix seconds) by name, of every version with a readable manifest."""
        return {name: manifest.created_s for name, manifest in self._manifests().items() if name.kind == kind}

    def usage_bytes(self) -> int:
        return sum(manifest.nbytes for manifest in self._manifests().values())

    def put(self, source: Path, *, pace: Pace | None = None) -> None:
        """Copies the version in shared memory at `source` and unpins it there, replacing a damaged copy. Raises
        TierExists if another version is there, TierFull, TierUnavailable, IntegrityError."""
        stored = StoredVersion.read(source)
        target = self.path(Name(stored.kind, stored.model, stored.version))
        with tier_errors(target):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_space(self._root, stored.nbytes, self._free_bytes)
            try:
                copies.persist(stored, target, pace=pace)
            except TierExists:
                if _is_whole(target):
                    raise
                self._hide(target)
                copies.persist(stored, target, pace=pace)
            finally:
                _remove_if_empty(target.parent)

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Raises VersionNotFound, IntegrityError, StoreFull, VersionExists."""
        return copies.restore(store, self._there(name))

    def verify(self, name: Name) -> Manifest:
        """Reads every byte. Raises VersionNotFound, IntegrityError."""
        return copies.verify(self._there(name))

    def remove(self, name: Name) -> bool:
        """Deletes a version; False if there was none. One rename hides it first."""
        with tier_errors(self.path(name)):
            return self._hide(self.path(name))

    quarantine = remove

    def collect(self) -> None:
        """Removes incomplete copies that no live process holds."""
        for family in directories(self._root):
            for path in family.glob(".*.partial-*"):
                copies.remove_partials(path.parent / path.name[1:].partition(".partial-")[0])

    def _there(self, name: Name) -> Path:
        path = self.path(name)
        if not path.is_dir():
            raise VersionNotFound(f"{name} is not in the {self.name} tier")
        return path

    def _manifests(self) -> dict[Name, Manifest]:
        found = {}
        for path in (path for family in directories(self._root) for path in directories(family)):
            model, version = decode_name(path.parent.name), decode_name(path.name)
            if model is None or version is None:
                continue  # .staging, .downloads, a copy being written
            try:
                changed_ns = os.stat(path / MANIFEST_FILE, follow_symlinks=False).st_mtime_ns
                if self._read.get(path, (0,))[0] != changed_ns:
                    self._read[path] = changed_ns, Manifest.read(path)
                manifest = self._read[path][1]
                found[Name(manifest.kind, model, version)] = manifest
            except (FileNotFoundError, IntegrityError):
                continue
        self._read = {path: known for path, known in self._read.items() if path.exists()}
        return found

    def _hide(self, path: Path) -> bool:
        # The model library's sweep reads the process id from the name.
        hidden = self._root / STAGING / f"removed-{os.getpid()}-{uuid.uuid4().hex}"
        hidden.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return False
        sync(path.parent)
        shutil.rmtree(hidden)
        _remove_if_empty(path.parent)
        return True


def _remove_if_empty(family: Path) -> None:
    try:
        family.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _is_whole(directory: Path) -> bool:
    """Whether manifest and headers of a version agree; its tensors are not read."""
    try:
        Manifest.read(directory).check_layout(Layout.read(directory), path=directory)
    except (IntegrityError, InvalidLayout):
        return False
    return True
