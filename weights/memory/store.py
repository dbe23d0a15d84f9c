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
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from weights.format.checksums import hashed
from weights.format.errors import (
    IntegrityError,
    StoreError,
    VersionLeased,
    VersionNotFound,
)
from weights.format.files import replace_file, write_file
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import DRAFT_FILE, KINDS, MANIFEST_FILE, Name, check_aux_name, version_path
from weights.memory import segment
from weights.memory.draft import Draft, free_path, publish
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
        free_path(self, name := Name(kind, model, version))
        if (index := layout.index_file()) is not None:
            aux_files[index[0]] = index[1]
        needed_bytes = layout.nbytes + sum(len(data) for data in aux_files.values())
        with self._staged({file.name: file.nbytes for file in layout.files}, needed_bytes) as (path, lock):
            for file in layout.files:
                with open(path / file.name, "r+b") as out:
                    out.write(file.header)
            for aux, data in aux_files.items():
                write_file(path / aux, data)
            # Written last, so that no process attaches to an incomplete draft.
            write_file(path / DRAFT_FILE, json.dumps(name).encode())
            return Draft(self, name, path, layout, lock, owner=True)

    def receive(
        self, manifest: Manifest, chunks: Callable[[str], Iterable[bytes]], *, source: object, pinned: bool = False
    ) -> StoredVersion:
        """The version of a manifest, created now, from the `chunks` of each of its files. Checks every byte whose
        checksum is known before it becomes visible. `source`: where the bytes are from. Raises IntegrityError,
        StoreFull, VersionExists."""
        free_path(self, manifest.name)
        found: dict[str, str] = {}
        segments = {file: record.nbytes for file, record in manifest.files.items() if record.header}
        with self._staged(segments, manifest.nbytes) as (path, lock), closing(lock):
            for file, record in manifest.files.items():
                if file not in segments:
                    segment.create(path / file, 0)
                with open(path / file, "r+b") as out:
                    for chunk in hashed(chunks(file), record.checksum, found, path=source, file=file):
                        out.write(chunk)
            manifest = replace(manifest.with_checksums(found), created_s=time.time())
            manifest.check_layout(Layout.read(path), path=source)
            return publish(self, path, manifest, pinned=pinned)

    @contextmanager
    def _staged(self, segments: Mapping[str, int], needed_bytes: int) -> Iterator[tuple[Path, DirectoryLock]]:
        """The locked directory of a draft, counted against the budget, with the memory of its segments (bytes by file
        name). After an error in the block nothing of it is left; raises StoreFull for want of memory."""
        path, lock = self.staging / uuid.uuid4().hex, None
        try:
            with self.mutex():
                self._make_room(needed_bytes)
                path.mkdir(mode=0o700)
                lock = DirectoryLock.try_shared(path)
                assert lock is not None, "nobody else removes drafts while we hold the mutex"
                for name, nbytes in segments.items():
                    if not self.pool.claim(nbytes, path / name):
                        segment.create(path / name, nbytes)
                self._trim(needed_bytes - sum(segments.values()))
            for name in segments:
                try:
                    segment.allocate(path / name)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    # The file system is fuller than the budget assumes: free the pool and evictable versions.
                    with self.mutex():
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

    def attach(self, path: Path | str, layout: Layout | None = None) -> Draft:
        """Opens the draft that another process reserved at `path`. Passing the layout saves reading it. Raises
        StoreError, IntegrityError."""
        path = Path(path)
        gone = f"no draft at {path}: it was committed, aborted or swept, or is of another store"
        lock = DirectoryLock.try_shared(path) if path.parent == self.staging else None
        if lock is None:
            raise StoreError(gone)
        try:
            name = Name(*json.loads((path / DRAFT_FILE).read_bytes()))
            layout = layout or Layout.read(path)
        except BaseException as error:
            # Close now, not when the traceback is freed: the last holder of an aborted draft cleans up.
            lock.close()
            if isinstance(error, FileNotFoundError):
                raise StoreError(gone) from None
            raise
        return Draft(self, name, path, layout, lock, owner=False)

    # Reading

    def find(self, kind: str, model: str, version: str) -> StoredVersion | None:
        """The committed version of this name, or None. Raises IntegrityError if it is damaged."""
        path = version_path(self.root, kind, model, version)
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
        for path in self._committed(kind, model):
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
            sealed = lease.manifest.with_checksums(lease.checksums())
            replace_file(stored.path, MANIFEST_FILE, sealed.to_bytes())

    # Removing

    def remove(self, stored: StoredVersion) -> None:
        """Removes a version, pinned or not; its segments go to the pool.

        Raises VersionLeased while a reader holds it, VersionNotFound if it is gone.
        """
        if not self._discard(stored.path):
            raise VersionNotFound(f"{stored.manifest.name} is no longer at {stored.path}")

    def discard(self, kind: str, model: str, version: str) -> None:
        """Removes the version of this name, even if unreadable. Idempotent. Raises VersionLeased."""
        self._discard(version_path(self.root, kind, model, version))

    def _discard(self, path: Path) -> bool:
        with self.mutex():
            lock = DirectoryLock.try_exclusive(path)
            if lock is None:
                if path.exists():
                    raise VersionLeased(f"{path} is being read; it can be removed when its last lease is released")
                return False
            with closing(lock):
                self._take_down(path)
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
                if version_path(self.root, *stored.manifest.name) != path:
                    raise IntegrityError(f"its manifest names {stored.manifest.name}", path=path)
                stored.manifest.check_layout(Layout.read(path), path=path)
            except IntegrityError as error:
                if path.exists():
                    damaged.append(error)
        return tuple(damaged)
