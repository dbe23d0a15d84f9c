"""Implements the weight store: reserve -> write -> commit -> lease -> evict, safe against kill -9 at any point.

docs/weight-store.md has the rules and their reasons. Directory locks decide which process may remove what; one mutex
file serialises space accounting; only a rename makes a version visible or invisible.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from weights.format.errors import IntegrityError, StoreError, StoreFull, VersionLeased, VersionNotFound
from weights.format.files import replace_file, write_file
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import (
    DRAFT_FILE,
    KINDS,
    MANIFEST_FILE,
    PINNED_FILE,
    Name,
    check_aux_name,
    encode_name,
)
from weights.format.source import Chunks, hashed
from weights.memory import segment
from weights.memory.draft import Draft, free_path, publish
from weights.memory.lease import Lease, StoredVersion, take_lease
from weights.memory.locks import DirectoryLock
from weights.memory.pool import Pool


@dataclass(frozen=True, order=True)
class Held:
    """One directory of the store: `nbytes` is the size of its files, reserved or written."""

    last_used_ns: int
    path: Path
    nbytes: int
    pinned: bool

    @property
    def leased(self) -> bool:
        lock = DirectoryLock.try_exclusive(self.path)
        if lock is not None:
            lock.close()
        return lock is None


@dataclass(frozen=True)
class Usage:
    """Bytes of a store: committed versions, drafts (and what is being removed), and the pool."""

    committed_bytes: int
    draft_bytes: int
    pool_bytes: int
    budget_bytes: int | None

    @property
    def used_bytes(self) -> int:
        return self.committed_bytes + self.draft_bytes + self.pool_bytes


class WeightStore:
    """Versions and snapshots under `root`. Any number of processes may hold one on the same root.

    `budget_bytes` bounds everything the store holds, pool and drafts included; None means no bound but the
    file system's. `pool_bytes` bounds the pool of freed segments (default: only by the budget). The root is
    made if it is absent. Raises StoreError if it is a symlink, belongs to another user or is open to others.

    `_full` and the methods from `_make_room` on are called under the store's mutex: then a lock probe never looks like
    a lease to another process, and no space is allocated twice.
    """

    def __init__(self, root: Path | str, *, budget_bytes: int | None, pool_bytes: int | None = None) -> None:
        root = Path(root)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StoreError(f"{root} must be a real directory, not a symlink, of this user, with mode 0700")
        self.root, self.staging, self.pool = root, root / "staging", Pool(root / "pool")
        self.budget_bytes, self.pool_bytes = budget_bytes, pool_bytes
        for directory in (*(root / f"{kind}s" for kind in KINDS), self.staging, self.pool.directory):
            if not directory.is_dir():  # where memory is full, one that is there is enough
                directory.mkdir(mode=0o700, exist_ok=True)

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
        free_path(self.root, name := Name(kind, model, version))
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
            return Draft(self.root, name, path, layout, lock, owner=True)

    def receive(self, manifest: Manifest, chunks: Chunks, *, source: object, pinned: bool = False) -> StoredVersion:
        """The version of a manifest, created now, from the `chunks` of each of its files. Checks every byte whose
        checksum is known before it becomes visible. `source`: where the bytes are from. Raises IntegrityError,
        StoreFull, VersionExists."""
        free_path(self.root, manifest.name)
        checksums: dict[str, str] = {}
        segments = {file: record.nbytes for file, record in manifest.files.items() if record.header}
        with self._staged(segments, manifest.nbytes) as (path, lock), closing(lock):
            for file, record in manifest.files.items():
                if file not in segments:
                    segment.create(path / file, 0)
                with open(path / file, "r+b") as out:
                    for chunk in hashed(chunks(file), record.checksum, checksums, path=source, file=file):
                        out.write(chunk)
            manifest = replace(manifest.with_checksums(checksums), created_s=time.time())
            manifest.check_layout(Layout.read(path), path=source)
            return publish(self.root, path, manifest, pinned=pinned)

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
        return Draft(self.root, name, path, layout, lock, owner=False)

    # Reading

    def find(self, kind: str, model: str, version: str) -> StoredVersion | None:
        """The committed version of this name, or None. Raises IntegrityError if it is damaged."""
        path = self.root / Name(kind, model, version).key
        try:
            return StoredVersion.read(path) if path.exists() else None
        except IntegrityError:
            if path.exists():
                raise
            return None  # removed while we read it

    def list(self, kind: str, model: str | None = None) -> list[StoredVersion]:
        """All readable versions of `kind`, or those of one model, oldest first. Damaged ones are reported by `sweep`,
        not here."""
        versions = []
        for path in self._committed(kind, model):
            try:
                versions.append(StoredVersion.read(path))
            except IntegrityError:
                continue
        return sorted(versions, key=lambda stored: stored.manifest.created_s)

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
        self._discard(self.root / Name(kind, model, version).key)

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
                if self.root / stored.manifest.name.key != path:
                    raise IntegrityError(f"its manifest names {stored.manifest.name}", path=path)
                stored.manifest.check_layout(Layout.read(path), path=path)
            except IntegrityError as error:
                if path.exists():
                    damaged.append(error)
        return tuple(damaged)

    # Space

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """The exclusive lock on the whole store, for the short time of counting and allocating space."""
        fd = os.open(self.root / ".mutex", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def usage(self) -> Usage:
        """What the store holds now, in bytes of file sizes (what is reserved counts as held)."""
        return Usage(
            committed_bytes=sum(held.nbytes for held in self._all_committed()),
            draft_bytes=sum(held.nbytes for held in _held_at(directories(self.staging))),
            pool_bytes=self.pool.nbytes,
            budget_bytes=self.budget_bytes,
        )

    def evict(self, bytes_needed: int) -> int:
        """Frees at least `bytes_needed` bytes if possible: the pool first, then unleased, unpinned versions, least
        recently used first. Returns the bytes freed."""
        with self.mutex():
            before = self.usage()
            self.pool.trim(max(0, before.pool_bytes - bytes_needed))
            if before.pool_bytes < bytes_needed:
                self._evict(bytes_needed - before.pool_bytes)
                self.pool.trim(0)
            return before.used_bytes - self.usage().used_bytes

    def evictable_bytes(self) -> int:
        """Bytes of unleased versions and snapshots that are not pinned, because another tier has them."""
        with self.mutex():
            return self._evictable_bytes()

    def trim_pool(self, keep_bytes: int = 0) -> int:
        """Returns freed segments to the system until the pool holds at most `keep_bytes`; returns the bytes freed."""
        with self.mutex():
            return self.pool.trim(keep_bytes)

    def room_bytes(self) -> int:
        """Bytes available to a reservation now: free bytes plus unleased, unpinned ones."""
        in_memory = shutil.disk_usage(self.root).free + self.pool.nbytes
        return int(min(in_memory, self._free_bytes())) + self.evictable_bytes()

    def full(self, needed_bytes: int) -> StoreFull:
        """The StoreFull error, with its numbers, for a caller that writes this many bytes beside the versions here."""
        with self.mutex():
            return self._full(needed_bytes)

    def _full(self, needed_bytes: int) -> StoreFull:
        usage, committed = self.usage(), self._all_committed()
        budget = "none" if self.budget_bytes is None else f"{self.budget_bytes} bytes"
        leased_bytes = sum(held.nbytes for held in committed if held.leased)
        pinned_bytes = sum(held.nbytes for held in committed if held.pinned)
        return StoreFull(
            f"no room for {needed_bytes} bytes: budget {budget}, in use {usage.used_bytes} bytes "
            f"(leased {leased_bytes}, without a copy on disk {pinned_bytes}, being written {usage.draft_bytes}), "
            f"free on the file system {shutil.disk_usage(self.root).free} bytes. Release or remove a version, persist "
            "one so that it can be evicted, or raise the memory budget"
        )

    def _committed(self, kind: str, model: str | None = None) -> Sequence[Path]:
        """Directories of all versions of `kind`, or of those of one model."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def _all_committed(self) -> Sequence[Held]:
        """Every version and snapshot, the least recently used first."""
        return sorted(_held_at([path for kind in KINDS for path in self._committed(kind)]))

    def _free_bytes(self) -> float:
        """Budget that versions and drafts leave; the pool counts as free, for it can be freed."""
        usage = self.usage()
        budget = math.inf if self.budget_bytes is None else self.budget_bytes
        return budget - usage.committed_bytes - usage.draft_bytes

    def _make_room(self, needed_bytes: int) -> None:
        """Sweeps and evicts until `needed_bytes` fit beside what must stay. Raises StoreFull, without evicting anything
        if eviction would not help."""
        if self._free_bytes() >= needed_bytes:
            return
        self._sweep_drafts()  # dead drafts hold budget too, and cost nothing to lose
        lacking = needed_bytes - self._free_bytes()
        if lacking <= self._evictable_bytes():
            self._evict(lacking)
        if self._free_bytes() < needed_bytes:
            raise self._full(needed_bytes)

    def _evictable_bytes(self) -> int:
        return sum(held.nbytes for held in self._all_committed() if not held.pinned and not held.leased)

    def _evict(self, lacking_bytes: float) -> None:
        """Removes unleased, unpinned versions, least recently used first, until `lacking_bytes` are free or none is
        left. Their segments go to the pool."""
        for held in self._all_committed():
            if lacking_bytes <= 0:
                return
            if held.pinned or (lock := DirectoryLock.try_exclusive(held.path)) is None:
                continue
            with closing(lock):
                if not (held.path / PINNED_FILE).exists():  # pinned between the scan and the lock
                    self._take_down(held.path)
                    lacking_bytes -= held.nbytes

    def _take_down(self, path: Path) -> None:
        """Removes the version at `path`, whose exclusive lock the caller holds. One rename hides it; a sweep removes
        leftovers of a crash."""
        hidden = self.staging / f"removed-{uuid.uuid4().hex}"
        os.rename(path, hidden)
        with suppress(OSError):  # other versions of the model stay, or a commit just came
            os.rmdir(path.parent)
        self.pool.dismantle(hidden, keep=True)

    def _sweep_drafts(self) -> None:
        """Removes everything unlocked in staging."""
        for path in list(self.staging.iterdir()):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)  # a draft that was committed meanwhile
            else:
                self.pool.take_unheld(path, keep=False)

    def _trim(self, upcoming_bytes: int) -> None:
        """Shrinks the pool to what both bounds leave beside everything else and the `upcoming_bytes` still to be
        written."""
        most = math.inf if self.pool_bytes is None else self.pool_bytes
        self.pool.trim(max(0, min(most, self._free_bytes() - upcoming_bytes)))


def directories(parent: Path) -> list[Path]:
    """Real directories directly under `parent`, sorted; empty if it is gone."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _held_at(paths: list[Path]) -> Iterator[Held]:
    """The directories at these paths that are still there."""
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path)}
            yield Held(path.lstat().st_mtime_ns, path, sum(sizes.values()), PINNED_FILE in sizes)
