"""Defines stored versions and their leases. A lease is a shared file lock that ends when its process ends."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from weights.format.errors import StoreError, VersionNotFound
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import PINNED_FILE
from weights.memory import segment
from weights.memory.locks import DirectoryLock


@dataclass(frozen=True)
class StoredVersion:
    """A committed version: `path` is its HF-style directory, `nbytes` the bytes of its files.

    Plain data, which does not prevent removal: take a lease to read the bytes.
    """

    kind: str
    model: str
    version: str
    path: Path
    nbytes: int
    manifest: Manifest = field(repr=False)

    @property
    def pinned(self) -> bool:
        """Whether eviction must skip the version, because no other tier has a copy yet."""
        return (self.path / PINNED_FILE).exists()

    @classmethod
    def read(cls, path: Path) -> StoredVersion:
        """Return the version at `path` without opening a tensor file. Raises IntegrityError."""
        manifest = Manifest.read(path)
        return cls(*manifest.name, path, manifest.nbytes, manifest)


class Mapped:
    """Views of the tensor files in the locked directory `path`; each view keeps the directory locked. `access`: see
    `weights.memory.segment`. A process forked later does not hold the lock and cannot map files.
    """

    def __init__(self, path: Path, layout: Layout, lock: DirectoryLock, access: segment.Access) -> None:
        self.path = path
        self.layout = layout
        self._lock: DirectoryLock | None = lock
        self._access: segment.Access = access
        self._windows: dict[str, memoryview] = {}

    @property
    def closed(self) -> bool:
        return self._lock is None or not self._lock.held

    def view(self, name: str) -> memoryview:
        """Return the bytes of tensor `name` (uint8, 1-D). The view keeps the directory locked while it exists, even
        after `close`. Raises InvalidLayout for an unknown name, StoreError once closed."""
        placed = self.layout.find(name)
        return self._file_view(placed.file)[placed.start : placed.end]

    def close(self) -> None:
        """Releases the lock; existing views keep it until they are freed. Safe to call twice."""
        self._lock, self._windows = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _file_view(self, file: str) -> memoryview:
        """Return a view of an entire file, header included; see `view`."""
        self._check_open()
        if file not in self._windows:
            nbytes = self.layout.file(file).nbytes
            self._windows[file] = segment.window(self.path / file, nbytes, self._access, self._lock)
        return self._windows[file]

    def _check_open(self) -> None:
        if self.closed:
            raise StoreError(f"the handle on {self.path} was closed, or lost in a fork: open a new handle")


class Lease(Mapped):
    """The right to read a version: while the lease or a view of it exists, the bytes do not change. Views are read-only
    and shared. Use `take_lease` or `WeightStore.lease`."""

    release = Mapped.close


def take_lease(stored: StoredVersion) -> Lease:
    """Takes a lease on `stored` after validating its headers.

    Raises VersionNotFound if it was removed meanwhile, and IntegrityError before anything is mapped.
    """
    lock = _locked(stored)
    try:
        layout = Layout.read(stored.path)
        os.utime(lock.fd)  # the directory's mtime is its last use, which orders eviction
    except BaseException:
        lock.close()
        raise
    return Lease(stored.path, layout, lock, "read")


def unpin(stored: StoredVersion) -> None:
    """Allow eviction of `stored`, because another tier has a copy. Safe to call twice."""
    with closing(_locked(stored)):
        (stored.path / PINNED_FILE).unlink(missing_ok=True)


def _locked(stored: StoredVersion) -> DirectoryLock:
    lock = DirectoryLock.try_shared(stored.path)
    if lock is None:
        raise VersionNotFound(f"{stored.manifest.name} is no longer at {stored.path}")
    return lock
