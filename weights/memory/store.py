"""Implements the weight store: reserve -> write -> commit -> lease -> evict, safe against kill -9 at any point.

docs/weight-store.md explains the rules. Directory locks decide which directories a process may remove; one
mutex file serialises space accounting; only a rename makes a version visible or invisible.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.format.errors import IntegrityError, StoreError, StoreFull, VersionExists, VersionLeased
from weights.format.layout import Layout
from weights.format.manifest import Chunks, Manifest, hashed
from weights.format.names import KINDS, MANIFEST_FILE, PINNED_FILE, TENSOR_SUFFIX, Name, encode_name, write_file
from weights.memory import segment
from weights.memory.lease import Lease, Mapped, StoredVersion, take_lease
from weights.memory.locks import DirectoryLock
from weights.memory.segment import Pool


@dataclass(frozen=True, order=True)
class Held:
    """A directory of the store. `nbytes`: size of the directory's files, reserved or written."""

    last_used_ns: int
    path: Path
    nbytes: int
    pinned: bool


@dataclass(frozen=True)
class Usage:
    """Bytes that a store uses: committed versions, drafts (with versions being removed), and the pool."""

    committed_bytes: int
    draft_bytes: int
    pool_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.committed_bytes + self.draft_bytes + self.pool_bytes


class Draft(Mapped):
    """A version being written: reserved, invisible, filled by several processes, committed or aborted. Created by
    `WeightStore.reserve`; other processes attach to `path`. A context manager, whose exit without a commit aborts the
    draft.

    Every process that has the draft open holds a shared lock on its directory. Views are writable and shared by all
    processes: writers of disjoint ranges need no coordination, but all writers must finish before `commit`.
    """

    def __init__(self, store: WeightStore, manifest: Manifest, path: Path, layout: Layout, lock: DirectoryLock) -> None:
        super().__init__(path, layout, lock, "write")
        self.name, self._store, self._manifest = manifest.name, store, manifest

    def commit(self, *, meta: Mapping[str, Any], pinned: bool = True) -> StoredVersion:
        """Makes the version visible atomically and closes the draft. Checksums, which would double its time, are added
        by a copy to a tier.

        A `pinned` version is not evicted until `lease.unpin`: eviction never removes a last copy. Raises VersionExists
        (the draft stays open), IntegrityError if `meta` is not JSON.
        """
        self._check_open()
        manifest = self._manifest.with_checksums({}, meta=dict(meta), created_s=time.time())
        stored = _publish(self._store.root, self.path, manifest, pinned=pinned)
        super().close()
        return stored

    def close(self) -> None:
        """Abort an uncommitted draft and free its memory. If other processes have the draft open, a sweep frees the
        memory after they close the draft. Safe to call twice and after commit."""
        if not self.closed:
            super().close()
            self._store.pool.take_unheld(self.path, keep=True)

    abort = close


class WeightStore:
    """Versions and snapshots under `root`. Any number of processes may open the same root.

    `budget_bytes` bounds all bytes of the store, including pool and drafts; None: only the file system's bound. An
    absent root is created. Raises StoreError if it is a symlink, belongs to another user or is open to others.

    Hold the store's mutex to call `_make_room` and the methods below it: then no lock probe looks like a lease to
    another process, and no space is allocated twice.
    """

    def __init__(self, root: Path | str, *, budget_bytes: int | None) -> None:
        root = Path(root)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StoreError(f"{root} must be a directory of this user with mode 0700, not a symlink")
        self.root, self.staging, self.pool = root, root / "staging", Pool(root / "pool")
        self.budget_bytes = budget_bytes
        for directory in (*(root / f"{kind}s" for kind in KINDS), self.staging, self.pool.directory):
            if not directory.is_dir():  # mkdir of an existing directory can fail if memory is full
                directory.mkdir(mode=0o700, exist_ok=True)

    # Writing

    def reserve(
        self, layout: Layout, *, kind: str, model: str, version: str, aux_files: Mapping[str, bytes] | None = None
    ) -> Draft:
        """Create a draft: allocate its memory, write headers and `aux_files`.

        `kind` is "version", "adapter" or "snapshot". Evicts unleased, unpinned versions if the budget requires it. The
        tensors' bytes are undefined (segments are re-used): write every byte before the commit. Raises StoreFull (no
        draft remains), VersionExists, InvalidName.
        """
        aux_files = dict(aux_files or {})
        _free_path(self.root, name := Name(kind, model, version))
        if (index := layout.index_file()) is not None:
            aux_files[index[0]] = index[1]
        manifest = Manifest.describe(layout, name, meta={}, aux_files=aux_files)
        with self._staged({file.name: file.nbytes for file in layout.files}, manifest.nbytes) as (path, lock):
            for file in layout.files:
                with open(path / file.name, "r+b") as out:
                    out.write(file.header)
            for aux, data in aux_files.items():
                write_file(path / aux, data)
            return Draft(self, manifest, path, layout, lock)

    def receive(self, manifest: Manifest, chunks: Chunks, *, source: object, pinned: bool = False) -> StoredVersion:
        """Create the version that a manifest describes from the `chunks` of each file. Checks every known checksum
        before the version becomes visible. `source`: origin of the bytes, for error messages. Raises IntegrityError,
        StoreFull, VersionExists."""
        _free_path(self.root, manifest.name)
        checksums: dict[str, str] = {}
        segments = {file: record.nbytes for file, record in manifest.files.items() if file.endswith(TENSOR_SUFFIX)}
        with self._staged(segments, manifest.nbytes) as (path, lock), closing(lock):
            for file, record in manifest.files.items():
                if file not in segments:
                    segment.create(path / file, 0)
                with open(path / file, "r+b") as out:
                    for chunk in hashed(chunks(file), record.checksum, checksums, path=source, file=file):
                        out.write(chunk)
            manifest = manifest.with_checksums(checksums, created_s=time.time())
            Layout.read(path)  # raises IntegrityError
            return _publish(self.root, path, manifest, pinned=pinned)

    @contextmanager
    def _staged(self, segments: Mapping[str, int], needed_bytes: int) -> Iterator[tuple[Path, DirectoryLock]]:
        """Create and lock a draft's directory, counted against the budget, with memory for `segments` (file name ->
        bytes). An error in the block removes the directory. Raises StoreFull if memory is insufficient."""
        path, lock = self.staging / uuid.uuid4().hex, None
        try:
            with self.mutex():
                self._make_room(needed_bytes)
                path.mkdir(mode=0o700)
                lock = DirectoryLock.try_shared(path)
                assert lock is not None, "no other process removes drafts while we hold the mutex"
                for name, nbytes in segments.items():
                    if not self.pool.claim(nbytes, path / name):
                        segment.create(path / name, nbytes)
                self.pool.trim(max(0, self._free_bytes() - (needed_bytes - sum(segments.values()))))
            for name in segments:
                try:
                    segment.allocate(path / name)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    # The file system has less space than the budget assumes: evict as many bytes, and empty the pool.
                    with self.mutex():
                        self._sweep_drafts()
                        self._evict(needed_bytes)
                        self.pool.trim(0)
                    segment.allocate(path / name)
            yield path, lock
        except BaseException as error:
            if lock is not None:
                lock.close()
                self.pool.take_unheld(path, keep=False)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise self.full(needed_bytes) from error
            raise

    def attach(self, path: Path | str, layout: Layout) -> Mapped:
        """Open another process's draft at `path` for writing. Raises StoreError."""
        lock = DirectoryLock.try_shared(path := Path(path))
        if lock is None:
            raise StoreError(f"no draft at {path}: it was committed, aborted or swept")
        return Mapped(path, layout, lock, "write")

    # Reading

    def find(self, kind: str, model: str, version: str) -> StoredVersion | None:
        """Return the committed version of this name, or None. Raises IntegrityError if the version is damaged."""
        path = self.root / Name(kind, model, version).key
        try:
            return StoredVersion.read(path) if path.exists() else None
        except IntegrityError:
            if path.exists():
                raise
            return None  # removed while it was read

    def list(self, kind: str, model: str | None = None) -> list[StoredVersion]:
        """Return all readable versions of `kind`, or only one model's versions, oldest first."""
        versions = []
        for path in self._committed(kind, model):
            with suppress(IntegrityError):
                versions.append(StoredVersion.read(path))
        return sorted(versions, key=lambda stored: stored.manifest.created_s)

    def lease(self, stored: StoredVersion) -> Lease:
        """Take a lease on `stored`; see `weights.memory.lease.take_lease`."""
        return take_lease(stored)

    # Removing

    def remove(self, stored: StoredVersion) -> None:
        """Remove a version, pinned or not, and pool its segments. Idempotent. Raises VersionLeased while a
        reader holds it."""
        self.discard(stored.kind, stored.model, stored.version)

    def discard(self, kind: str, model: str, version: str) -> None:
        """Remove a version like `remove`, but by name and even if the version is unreadable."""
        path = self.root / Name(kind, model, version).key
        with self.mutex():
            lock = DirectoryLock.try_exclusive(path)
            if lock is not None:
                with closing(lock):
                    self._take_down(path)
            elif path.exists():
                raise VersionLeased(f"{path} is being read; it can be removed when its last lease is released")
            self.pool.trim(max(0, self._free_bytes()))

    def sweep(self) -> None:
        """Remove leftovers of dead processes: unlocked drafts and partly removed versions. Never removes a locked
        directory or a committed version."""
        with self.mutex():
            self._sweep_drafts()

    # Space

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Hold the exclusive lock on the store; hold it briefly, to count and allocate space."""
        fd = os.open(self.root / ".mutex", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def usage(self) -> Usage:
        """Return the bytes in the store now by file size, so a reservation counts in full."""
        committed_bytes = sum(held.nbytes for held in self._all_committed())
        draft_bytes = sum(held.nbytes for held in _held_at(directories(self.staging)))
        return Usage(committed_bytes, draft_bytes, self.pool.nbytes)

    def evict(self, nbytes: int) -> int:
        """Free at least `nbytes` bytes if possible: the pool first, then unleased, unpinned versions, least recently
        used first. Returns the bytes freed."""
        with self.mutex():
            before = self.usage()
            self.pool.trim(max(0, before.pool_bytes - nbytes))
            if before.pool_bytes < nbytes:
                self._evict(nbytes - before.pool_bytes)
                self.pool.trim(0)
            return before.used_bytes - self.usage().used_bytes

    def idle_bytes(self) -> int:
        """Return the bytes that `evict` can free now. Also removes drafts of dead or aborted writers."""
        with self.mutex():
            self._sweep_drafts()
            return self.pool.nbytes + self._evictable_bytes()

    def room_bytes(self) -> int:
        """Return the bytes available to a reservation now: free bytes plus bytes of unleased, unpinned versions."""
        with self.mutex():
            in_memory = shutil.disk_usage(self.root).free + self.pool.nbytes
            return int(min(in_memory, self._free_bytes())) + self._evictable_bytes()

    def full(self, needed_bytes: int) -> StoreFull:
        """Return the StoreFull error, with the store's numbers, for a caller that needs this many more bytes."""
        usage, budget = self.usage(), "none" if self.budget_bytes is None else f"{self.budget_bytes} bytes"
        pinned_bytes = sum(held.nbytes for held in self._all_committed() if held.pinned)
        return StoreFull(
            f"no room for {needed_bytes} bytes: budget {budget}, in use {usage.used_bytes} bytes "
            f"(without a copy on disk {pinned_bytes}, being written {usage.draft_bytes}), "
            f"free on the file system {shutil.disk_usage(self.root).free} bytes. Release or remove a version, persist "
            "one so that it can be evicted, or raise the memory budget"
        )

    def _committed(self, kind: str, model: str | None = None) -> Sequence[Path]:
        """Return the directories of all versions of `kind`, or only of one model's versions."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def _all_committed(self) -> Sequence[Held]:
        """Return every version and snapshot, the least recently used first."""
        return sorted(_held_at([path for kind in KINDS for path in self._committed(kind)]))

    def _free_bytes(self) -> float:
        """Return the budget minus versions and drafts; the pool counts as free because it can be freed."""
        usage = self.usage()
        budget = math.inf if self.budget_bytes is None else self.budget_bytes
        return budget - usage.committed_bytes - usage.draft_bytes

    def _make_room(self, needed_bytes: int) -> None:
        """Sweep and evict until `needed_bytes` fit the budget. If eviction cannot suffice, raises StoreFull without
        evicting."""
        if self._free_bytes() >= needed_bytes:
            return
        self._sweep_drafts()  # dead drafts use budget without any use
        lacking = needed_bytes - self._free_bytes()
        if lacking <= self._evictable_bytes():
            self._evict(lacking)
        if self._free_bytes() < needed_bytes:
            raise self.full(needed_bytes)

    def _evictable_bytes(self) -> int:
        evictable = 0
        for held in self._all_committed():
            if not held.pinned and (lock := DirectoryLock.try_exclusive(held.path)) is not None:
                lock.close()
                evictable += held.nbytes
        return evictable

    def _evict(self, lacking_bytes: float) -> None:
        """Remove unleased, unpinned versions, least recently used first, until `lacking_bytes` are free or no such
        version remains, and pool their segments."""
        for held in self._all_committed():
            if lacking_bytes <= 0:
                return
            if held.pinned or (lock := DirectoryLock.try_exclusive(held.path)) is None:
                continue
            with closing(lock):
                self._take_down(held.path)
            lacking_bytes -= held.nbytes

    def _take_down(self, path: Path) -> None:
        """Remove the version at `path`, whose exclusive lock the caller holds. One rename hides the version; after a
        crash a sweep removes the rest."""
        hidden = self.staging / f"removed-{uuid.uuid4().hex}"
        os.rename(path, hidden)
        with suppress(OSError):  # not empty, because other versions remain or were just committed
            os.rmdir(path.parent)
        self.pool.dismantle(hidden, keep=True)

    def _sweep_drafts(self) -> None:
        """Remove all unlocked directories in staging."""
        for path in list(self.staging.iterdir()):
            self.pool.take_unheld(path, keep=False)


def directories(parent: Path) -> list[Path]:
    """Return the directories directly under `parent` (no symlinks), sorted; empty if `parent` is gone."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _held_at(paths: list[Path]) -> Iterator[Held]:
    """Yield a Held for each of these paths that still exists."""
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path)}
            yield Held(path.lstat().st_mtime_ns, path, sum(sizes.values()), PINNED_FILE in sizes)


def _free_path(root: Path, name: Name) -> Path:
    """Return the path for a version to be written. Raises VersionExists, InvalidName."""
    path = root / name.key
    if path.exists():
        raise VersionExists(f"{name} exists; choose another version name or remove it")
    return path


def _publish(root: Path, path: Path, manifest: Manifest, *, pinned: bool) -> StoredVersion:
    """Publish the draft at `path` under the manifest's name. Raises VersionExists, IntegrityError, StoreError."""
    target = _free_path(root, manifest.name)
    write_file(path / MANIFEST_FILE, manifest.to_bytes())
    if pinned:
        write_file(path / PINNED_FILE, b"")
    while True:
        for directory in (target.parent.parent, target.parent):  # parents=True would give another mode
            directory.mkdir(mode=0o700, exist_ok=True)
        try:
            os.rename(path, target)
            return StoredVersion(*manifest.name, target, manifest.nbytes, manifest)
        except FileNotFoundError:
            # The model's empty directory was removed between mkdir and rename: create the directory again, unless the
            # draft itself is gone.
            if not path.exists():
                raise StoreError(f"the draft {path} is gone: swept or already committed") from None
        except OSError:
            _free_path(root, manifest.name)  # another process published this version first
            raise
