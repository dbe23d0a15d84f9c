"""Keeps a store within its bounds: counts, reserves, evicts, sweeps, trims.

Call everything here except `mutex`, `usage` and `committed` under the store's mutex: then a lock probe never looks like
a lease to another process, and no space is allocated twice.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from weights.format.errors import StoreFull
from weights.format.layout import Layout
from weights.format.manifest import KINDS
from weights.format.names import PINNED_FILE, encode_name
from weights.memory import segment
from weights.memory.locks import DirectoryLock, store_mutex
from weights.memory.pool import Pool, dismantle


@dataclass(frozen=True)
class Held:
    """One directory of the store: `nbytes` is the size of its files, reserved or written."""

    path: Path
    nbytes: int
    last_used_ns: int
    pinned: bool


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


class Evictor:
    """The bounds of one store root; holds no state of its own beyond them."""

    def __init__(self, root: Path, *, budget_bytes: int | None, pool_bytes: int | None) -> None:
        self.root = root
        self.staging = root / "staging"
        self.pool = Pool(root / "pool")
        self.budget_bytes = budget_bytes
        self.pool_bytes = pool_bytes

    def make_directories(self) -> None:
        """Those of a store whose root is there."""
        for directory in (*(self.root / f"{kind}s" for kind in KINDS), self.staging, self.pool.directory):
            if not directory.is_dir():  # where memory is full, one that is there is enough
                directory.mkdir(mode=0o700, exist_ok=True)

    def mutex(self) -> AbstractContextManager[None]:
        """Hold this context manager while counting and allocating space. Directories that somebody removed are made
        again: without the pool nothing could be removed until the box started again."""
        self.make_directories()
        return store_mutex(self.root / ".mutex")

    def usage(self) -> Usage:
        """What the store holds now, in bytes of file sizes (what is reserved counts as held)."""
        return Usage(
            committed_bytes=sum(held.nbytes for held in self.all_committed()),
            draft_bytes=sum(held.nbytes for path in directories(self.staging) if (held := _held_at(path)) is not None),
            pool_bytes=sum(pooled.nbytes for pooled in self.pool.files()),
            budget_bytes=self.budget_bytes,
        )

    def committed(self, kind: str, model: str | None = None) -> list[Path]:
        """Directories of all versions of `kind`, or of those of one model."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def all_committed(self) -> list[Held]:
        """Sizes of every version and snapshot, the least recently used first."""
        found = (_held_at(path) for kind in KINDS for path in self.committed(kind))
        return sorted((held for held in found if held is not None), key=lambda held: held.last_used_ns)

    def free_bytes(self) -> int | None:
        """Budget that versions and drafts leave; the pool counts as free, for it can be freed. None: no budget."""
        usage = self.usage()
        return None if self.budget_bytes is None else self.budget_bytes - usage.committed_bytes - usage.draft_bytes

    def stake(self, layout: Layout, needed_bytes: int, path: Path) -> DirectoryLock:
        """Makes the draft directory `path`, locked, whose files have their sizes, counted against the budget. Raises
        StoreFull."""
        self._make_room(needed_bytes)
        path.mkdir(mode=0o700)
        lock = DirectoryLock.try_shared(path)
        assert lock is not None, "nobody else removes drafts while we hold the mutex"
        try:
            for file in layout.files:
                if not self.pool.claim(file.nbytes, path / file.name):
                    segment.create(lock.fd, file.name, file.nbytes)
            self.trim(needed_bytes - layout.nbytes)
        except BaseException:
            lock.close()
            self.pool.take_unheld(path, keep=False)
            raise
        return lock

    def _make_room(self, needed_bytes: int) -> None:
        """Sweeps and evicts until `needed_bytes` fit beside what must stay. Raises StoreFull, without evicting anything
        if eviction would not help."""
        free_bytes = self.free_bytes()
        if free_bytes is not None and free_bytes < needed_bytes:
            self.sweep_drafts()  # dead drafts hold budget too, and cost nothing to lose
            lacking = needed_bytes - (self.free_bytes() or 0)
            if lacking <= self.evictable_bytes():
                self.evict(lacking)
            if (self.free_bytes() or 0) < needed_bytes:
                raise self.full(needed_bytes)

    def evictable_bytes(self) -> int:
        """Bytes of unleased, unpinned versions."""
        return sum(held.nbytes for held in self.all_committed() if not held.pinned and not _leased(held))

    def evict(self, lacking_bytes: int) -> None:
        """Removes unleased, unpinned versions, least recently used first, until `lacking_bytes` are free or none is
        left. Their segments go to the pool."""
        for held in self.all_committed():
            if lacking_bytes <= 0:
                return
            if held.pinned or (lock := DirectoryLock.try_exclusive(held.path)) is None:
                continue
            if (held.path / PINNED_FILE).exists():  # pinned between the scan and the lock
                lock.close()
                continue
            self.take_down(held.path, lock)
            lacking_bytes -= held.nbytes

    def take_down(self, path: Path, lock: DirectoryLock) -> None:
        """Removes the version at `path`, whose exclusive lock is `lock`, and closes the lock. One rename hides it; a
        sweep removes leftovers of a crash."""
        hidden = self.staging / f"removed-{uuid.uuid4().hex}"
        try:
            os.rename(path, hidden)
            try:
                os.rmdir(path.parent)
            except OSError:  # other versions of the model stay, or a commit just came
                pass
            dismantle(hidden, self.pool)
        finally:
            lock.close()

    def sweep_drafts(self) -> list[Path]:
        """Removes everything unlocked in staging; returns the paths."""
        removed = []
        for entry in list(os.scandir(self.staging)):
            path = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(path)
                removed.append(path)
            elif self.pool.take_unheld(path, keep=False):
                removed.append(path)
        return removed

    def trim(self, upcoming_bytes: int) -> None:
        """Shrinks the pool to what both bounds leave beside everything else and the `upcoming_bytes` still to be
        written."""
        bounds = [self.pool_bytes, self.free_bytes()]
        if bounds[1] is not None:
            bounds[1] -= upcoming_bytes
        if known := [bound for bound in bounds if bound is not None]:
            self.pool.trim(max(0, min(known)))

    def full(self, needed_bytes: int) -> StoreFull:
        """The error for a reservation of `needed_bytes`, with the current numbers."""
        usage, committed = self.usage(), self.all_committed()
        return StoreFull(
            needed_bytes=needed_bytes,
            used_bytes=usage.used_bytes,
            budget_bytes=self.budget_bytes,
            free_bytes=shutil.disk_usage(self.root).free,
            leased_bytes=sum(held.nbytes for held in committed if _leased(held)),
            pinned_bytes=sum(held.nbytes for held in committed if held.pinned),
            draft_bytes=usage.draft_bytes,
        )


def directories(parent: Path) -> list[Path]:
    """Real directories directly under `parent`, sorted; empty if it is gone."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _held_at(path: Path) -> Held | None:
    """The directory at `path`; None if it is gone."""
    try:
        entries = list(os.scandir(path))
        nbytes = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        last_used_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):  # removed while we looked
        return None
    return Held(path, nbytes, last_used_ns, any(entry.name == PINNED_FILE for entry in entries))


def _leased(held: Held) -> bool:
    lock = DirectoryLock.try_exclusive(held.path)
    if lock is None:
        return True
    lock.close()
    return False
