"""Implements the weight store: reserve -> write -> commit -> lease -> evict, safe against kill -9 at any point.

docs/weight-store.md has the rules and their reasons. Directory locks decide which process may remove what; one mutex
file serialises space accounting; only a rename makes a version visible or invisible.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from weights.format.checksums import checksum, hashed
from weights.format.errors import (
    IntegrityError,
    InvalidName,
    StoreError,
    VersionExists,
    VersionLeased,
    VersionNotFound,
)
from weights.format.files import replace_file, write_file
from weights.format.layout import Layout
from weights.format.manifest import KINDS, Manifest
from weights.format.names import DRAFT_FILE, MANIFEST_FILE, check_aux_name, version_path
from weights.memory import segment
from weights.memory.draft import Draft, publish
from weights.memory.lease import Lease, StoredVersion, take_lease
from weights.memory.locks import DirectoryLock
from weights.memory.space import Space


class WeightStore(Space):
    """Versions and snapshots under `root`. Any number of processes may hold one on the same root.

    `budget_bytes` bounds everything the store holds, pool and drafts included; None means no bound but the
    file system's. `pool_bytes` bounds the pool of freed segments (default: only by the budget). The root is
    made if it is absent. Raises StoreError if it is a symlink, belongs to another user or is open to others.
    """

    def __init__(self, root: Path | str, *, budget_bytes: int | None, pool_bytes: int | None = None) -> None:
        root = Path(root)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StoreError(f"{root} must be a real directory, not a symlink, of this user, with mode 0700")
        super().__init__(root, budget_bytes=budget_bytes, pool_bytes=pool_bytes)

    # Writing

    def reserve(
        self,
        layout: Layout,
        *,
        kind: str,
        model: str,
        version: str,
        aux_files: Mapping[str, bytes] | None = None,
    ) -> Draft:
        """A draft with all its memory allocated, headers and `aux_files` written, tensors undefined.

        `kind` is "version", "adapter" or "snapshot". Evicts unleased, unpinned versions if the budget asks for it. The
        tensors' bytes are undefined (segments are re-used): write every byte before the commit. Raises StoreFull
        (nothing left behind), VersionExists, InvalidName.
        """
        aux_files = {check_aux_name(aux): data for aux, data in (aux_files or {}).items()}
        if version_path(self.root, _check_kind(kind), model, version).exists():
            raise VersionExists(f"{kind} {model!r} {version!r} exists; choose another version name or remove it")
        if (index := layout.index_file()) is not None:
            aux_files[index[0]] = index[1]
        needed_bytes = layout.nbytes + sum(len(data) for data in aux_files.values())
        path = self.staging / uuid.uuid4().hex
        with self._staked(path, {file.name: file.nbytes for file in layout.files}, needed_bytes) as lock:
            for file in layout.files:
                with open(os.open(file.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=lock.fd), "wb") as out:
                    out.write(file.header)
            for aux, data in aux_files.items():
                write_file(lock.fd, aux, data)
            named = {"kind": kind, "model": model, "version": version}
            # Written last, so that no process attaches to an incomplete draft.
            write_file(lock.fd, DRAFT_FILE, json.dumps(named).encode())
            return Draft(self.root, path, layout, lock, **named, owner=True)

    def receive(
        self, manifest: Manifest, chunks: Callable[[str], Iterable[bytes]], *, source: object, pinned: bool = False
    ) -> StoredVersion:
        """The version of a manifest, created now, from the `chunks` of each of its files. Checks every byte whose
        checksum is known before it becomes visible. `source`: where the bytes are from. Raises IntegrityError,
        StoreFull, VersionExists."""
        if version_path(self.root, manifest.kind, manifest.model, manifest.version).exists():
            raise VersionExists(f"{manifest.kind} {manifest.model!r} {manifest.version!r} exists")
        path, found = self.staging / uuid.uuid4().hex, dict[str, str]()
        segments = {file: record.nbytes for file, record in manifest.files.items() if record.header}
        with self._staked(path, segments, manifest.nbytes) as lock:
            for file, record in manifest.files.items():
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(file, flags, 0o600, dir_fd=lock.fd), "wb", buffering=0) as out:
                    for chunk in hashed(chunks(file), record.checksum, found, path=source, file=file):
                        rest = memoryview(chunk)
                        while rest:
                            rest = rest[out.write(rest) :]
            manifest = replace(manifest.with_checksums(found), created_s=time.time())
            manifest.check_layout(Layout.read(path), path=source)
            stored = publish(self.root, path, lock.fd, manifest, pinned=pinned)
            lock.close()
            return stored

    @contextmanager
    def _staked(self, path: Path, segments: Mapping[str, int], needed_bytes: int) -> Iterator[DirectoryLock]:
        """The locked directory of a draft whose segments have their memory. After an error in the block nothing of it
        is left; raises StoreFull for want of memory."""
        lock: DirectoryLock | None = None
        try:
            with self.mutex():
                lock = self._stake(path, segments, needed_bytes)
            for name in segments:
                try:
                    segment.allocate(lock.fd, name)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    # The file system is fuller than the budget assumes: free the pool and evictable versions.
                    with self.mutex():
                        self._evict(needed_bytes)
                        self.pool.trim(0)
                    segment.allocate(lock.fd, name)
            yield lock
        except BaseException as error:
            if lock is not None:
                lock.close()
                self.pool.take_unheld(path, keep=False)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise self.full(needed_bytes) from error
            raise

    def attach(self, path: Path | str, layout: Layout | None = None) -> Draft:
        """Opens the draft that another process reserved at `path`. Passing the layout saves reading it. Raises
        StoreError, IntegrityError."""
        path = Path(path)
        gone = f"no draft at {path}: it was committed, aborted or swept, or is of another store"
        lock = DirectoryLock.try_shared(path) if path.parent == self.staging else None
        if lock is None:
            raise StoreError(gone)
        try:
            named = json.loads((path / DRAFT_FILE).read_bytes())
            layout = layout or Layout.read(path)
        except BaseException as error:
            # Close now, not when the traceback is freed: the last holder of an aborted draft cleans up.
            lock.close()
            if isinstance(error, FileNotFoundError):
                raise StoreError(gone) from None
            raise
        return Draft(self.root, path, layout, lock, **named, owner=False)

    # Reading

    def find(self, kind: str, model: str, version: str) -> StoredVersion | None:
        """The committed version of this name, or None. Raises IntegrityError if it is damaged."""
        path = version_path(self.root, _check_kind(kind), model, version)
        try:
            return StoredVersion.read(path) if path.exists() else None
        except IntegrityError:
            if path.exists():
                raise
            return None  # removed while we read it

    def list(self, kind: str, model: str | None = None) -> list[StoredVersion]:
        """All readable versions of `kind`, or those of one model, oldest first. Damaged ones are reported by `sweep`,
        not here."""
        found = []
        for path in self._committed(_check_kind(kind), model):
            try:
                found.append(StoredVersion.read(path))
            except IntegrityError:
                continue
        return sorted(found, key=lambda stored: stored.manifest.created_s)

    def lease(self, stored: StoredVersion) -> Lease:
        """Takes a lease on `stored`; see `weights.memory.lease.take_lease`."""
        return take_lease(stored)

    def seal(self, stored: StoredVersion) -> None:
        """Records the checksums that `commit(checksums=False)` left out, beside readers. Raises VersionNotFound,
        IntegrityError."""
        with self.lease(stored) as lease:
            sums = {file.name: checksum(lease.file_view(file.name)) for file in lease.layout.files}
            replace_file(stored.path, MANIFEST_FILE, lease.manifest.with_checksums(sums).to_bytes())

    # Removing

    def remove(self, stored: StoredVersion) -> None:
        """Removes a version, pinned or not; its segments go to the pool.

        Raises VersionLeased while a reader holds it, VersionNotFound if it is gone.
        """
        if not self._discard(stored.path):
            raise VersionNotFound(f"{stored.kind} {stored.model!r} {stored.version!r} is no longer at {stored.path}")

    def discard(self, kind: str, model: str, version: str) -> None:
        """Removes the version of this name, even if unreadable. Idempotent. Raises VersionLeased."""
        self._discard(version_path(self.root, _check_kind(kind), model, version))

    def _discard(self, path: Path) -> bool:
        with self.mutex():
            lock = DirectoryLock.try_exclusive(path)
            if lock is None:
                if path.exists():
                    raise VersionLeased(f"{path} is being read; it can be removed when its last lease is released")
                return False
            self._take_down(path, lock)
            self._trim(0)
            return True

    def sweep(self) -> tuple[IntegrityError, ...]:
        """Removes leftovers of dead processes: unlocked drafts, half-removed versions, stray files. Returns
        what is wrong with damaged versions.

        It never touches anything that a live process holds, nor a committed version.
        """
        with self.mutex():
            self._sweep_drafts()
        damaged = []
        for path in (path for kind in KINDS for path in self._committed(kind)):
            try:
                stored = StoredVersion.read(path)
                if version_path(self.root, stored.kind, stored.model, stored.version) != path:
                    raise IntegrityError(f"its manifest names {stored.model!r} {stored.version!r}", path=path)
                stored.manifest.check_layout(Layout.read(path), path=path)
            except IntegrityError as error:
                if path.exists():
                    damaged.append(error)
        return tuple(damaged)


def _check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise InvalidName(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
