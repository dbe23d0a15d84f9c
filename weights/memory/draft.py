"""Implements drafts, versions being written: reserved, invisible, filled by several processes, committed or aborted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.format.errors import StoreError, VersionExists
from weights.format.files import write_file
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import DRAFT_FILE, MANIFEST_FILE, PINNED_FILE, TENSOR_SUFFIX, Name
from weights.memory.lease import Mapped, StoredVersion
from weights.memory.locks import DirectoryLock
from weights.memory.pool import Pool


class Draft(Mapped):
    """Made by `WeightStore.reserve` or `WeightStore.attach`. A context manager: leaving it without a commit aborts the
    draft on the handle that reserved it, and only closes an attached handle.

    Every process that has it open holds a shared lock on its directory. If all end without a commit, a sweep removes
    it. Other processes attach to `path`.

    Views are writable and shared by every process that has the draft open: writes are in the version at once. Writers
    of disjoint ranges need no coordination, but all must finish before `commit`.
    """

    def __init__(self, root: Path, name: Name, path: Path, layout: Layout, lock: DirectoryLock, *, owner: bool):
        super().__init__(path, layout, lock, "write")
        self.name, self._root, self._owner = name, root, owner

    @property
    def target(self) -> Path:
        """Path of the version after the commit."""
        return self._root / self.name.key

    def commit(self, *, meta: Mapping[str, Any], checksums: bool = True, pinned: bool = True) -> StoredVersion:
        """Makes the version visible atomically and closes the draft.

        `checksums=False` keeps the hot path at memcpy rate; `WeightStore.seal` adds them. A `pinned` version is not
        evicted until `lease.unpin`: eviction never takes a last copy.
        Raises VersionExists (the draft stays open), IntegrityError if `meta` is not JSON.
        """
        self._check_open()
        files = [file for file in self.path.iterdir() if not file.name.startswith(".") and file.suffix != TENSOR_SUFFIX]
        aux_files = {file.name: file.read_bytes() for file in files}
        manifest = Manifest.describe(self.layout, self.name, meta=meta, aux_files=aux_files)
        if checksums:
            manifest = manifest.with_checksums(self.checksums())
        stored = publish(self._root, self.path, manifest, pinned=pinned)
        super().close()
        return stored

    def abort(self) -> None:
        """Frees the draft's memory; the draft was never visible. Safe to call twice and after commit.

        If other processes or views still hold the draft, the last one to close it cleans up, or a sweep after their
        death.
        """
        if not self.closed:
            (self.path / DRAFT_FILE).unlink(missing_ok=True)
            self._close()

    def close(self) -> None:
        """Closes an attached handle and leaves the draft to the others; on the reserving handle it aborts."""
        if self._owner:
            self.abort()
        elif not self.closed:
            self._close()

    def _close(self) -> None:
        super().close()
        if not (self.path / DRAFT_FILE).exists():
            Pool(self._root / "pool").take_unheld(self.path, keep=True)


def free_path(root: Path, name: Name) -> Path:
    """The path of a version to be written. Raises VersionExists, InvalidName."""
    path = root / name.key
    if path.exists():
        raise VersionExists(f"{name} exists; choose another version name or remove it")
    return path


def publish(root: Path, path: Path, manifest: Manifest, *, pinned: bool) -> StoredVersion:
    """Makes the written draft at `path` the version of the manifest. Raises VersionExists, IntegrityError,
    StoreError."""
    target = free_path(root, manifest.name)
    write_file(path / MANIFEST_FILE, manifest.to_bytes())
    if pinned:
        write_file(path / PINNED_FILE, b"")
    (path / DRAFT_FILE).unlink(missing_ok=True)
    while True:
        for directory in (target.parent.parent, target.parent):  # `parents` would give the first another mode
            directory.mkdir(mode=0o700, exist_ok=True)
        try:
            os.rename(path, target)
            return StoredVersion(*manifest.name, target, manifest.nbytes, manifest)
        except FileNotFoundError:
            # The model's directory was removed as empty between mkdir and rename: make it again, unless the draft
            # itself is gone.
            if not path.exists():
                raise StoreError(f"the draft {path} is gone: swept or already committed") from None
        except OSError:
            free_path(root, manifest.name)  # another process was faster
            raise
