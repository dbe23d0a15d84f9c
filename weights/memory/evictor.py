"""Keeps a store within its bounds: counts, evicts, sweeps, trims.

Call everything here except `mutex`, `usage` and `committed` under the store's mutex: then a lock probe never looks like
a lease to another process, and no space is allocated twice.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weights.format.errors import StoreFull
from weights.format.manifest import KINDS
from weights.format.names import encode_name
from weights.memory.locks import DirectoryLock, StoreMutex
from weights.memory.pool import Pool
from weights.memory.removal import dismantle, hide
from weights.memory.space import Held, Usage, choose_evictions, directories, held_at


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

    def mutex(self) -> StoreMutex:
        """Hold this context manager while counting and allocating space. Directories that somebody removed are made
        again: without the pool nothing could be removed until the box started again."""
        self.make_directories()
        return StoreMutex(self.root / ".mutex")

    def usage(self) -> Usage:
        """What the store holds now, in bytes of file sizes (what is reserved counts as held)."""
        return Usage(
            committed_bytes=sum(held.nbytes for held in self.all_committed()),
            draft_bytes=sum(held.nbytes for path in directories(self.staging) if (held := held_at(path)) is not None),
            pool_bytes=sum(pooled.nbytes for pooled in self.pool.files()),
            budget_bytes=self.budget_bytes,
        )

    def committed(self, kind: str, model: str | None = None) -> list[Path]:
        """Directories of all versions of `kind`, or of those of one model."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def all_committed(self) -> list[Held]:
        """Sizes of every version and snapshot."""
        found = (held_at(path) for kind in KINDS for path in self.committed(kind))
        return [held for held in found if held is not None]

    def make_room(self, needed_bytes: int) -> None:
        """Sweeps and evicts until `needed_bytes` fit beside what must stay. It ignores the pool, which can be freed
        entirely. Raises StoreFull, without evicting anything if eviction would not help."""
        assert self.budget_bytes is not None

        def excess_bytes() -> int:
            usage = self.usage()
            return usage.committed_bytes + usage.draft_bytes + needed_bytes - self.budget_bytes

        if excess_bytes() > 0:
            self.sweep_drafts()  # dead drafts hold budget too, and cost nothing to lose
        excess = excess_bytes()
        if excess > 0:
            # Refuse first if eviction would not help.
            if self.evictable_bytes() >= excess:
                self.evict(excess)
            if excess_bytes() > 0:
                raise self.full(needed_bytes)

    def evictable_bytes(self) -> int:
        """Bytes of unleased, unpinned versions."""
        return sum(held.nbytes for held in self.all_committed() if not held.pinned and not _leased(held))

    def evict(self, excess_bytes: int) -> None:
        """Removes unleased, unpinned versions, least recently used first, until `excess_bytes` are free or none is
        left. Their segments go to the pool."""
        candidates = self.all_committed()
        while excess_bytes > 0 and (chosen := choose_evictions(candidates, excess_bytes)):
            for held in chosen:
                candidates.remove(held)
                lock = DirectoryLock.try_exclusive(held.path)
                if lock is None:
                    continue
                now = held_at(held.path)
                if now is None or now.pinned:  # pinned between the scan and the lock
                    lock.close()
                    continue
                self.take_down(held.path, lock)
                excess_bytes -= held.nbytes

    def take_down(self, path: Path, lock: DirectoryLock) -> None:
        """Removes the version at `path`, whose exclusive lock is `lock`, and closes the lock."""
        try:
            dismantle(hide(path, self.staging), self.pool)
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
                continue
            lock = DirectoryLock.try_exclusive(path)
            if lock is None:
                continue
            try:
                dismantle(path, None)
            finally:
                lock.close()
            removed.append(path)
        return removed

    def trim(self, upcoming_bytes: int) -> None:
        """Shrinks the pool to what both bounds leave beside everything else and the `upcoming_bytes` still to be
        written."""
        if self.budget_bytes is None and self.pool_bytes is None:
            return
        usage = self.usage()
        keep = usage.pool_bytes if self.pool_bytes is None else self.pool_bytes
        if self.budget_bytes is not None:
            keep = min(keep, self.budget_bytes - usage.committed_bytes - usage.draft_bytes - upcoming_bytes)
        self.pool.trim(max(0, keep))

    def full(self, needed_bytes: int) -> StoreFull:
        """The error for a reservation of `needed_bytes`, with the current numbers."""
        usage = self.usage()
        committed = self.all_committed()
        return StoreFull(
            needed_bytes=needed_bytes,
            used_bytes=usage.used_bytes,
            budget_bytes=self.budget_bytes,
            free_bytes=shutil.disk_usage(self.root).free,
            leased_bytes=sum(held.nbytes for held in committed if _leased(held)),
            pinned_bytes=sum(held.nbytes for held in committed if held.pinned),
            draft_bytes=usage.draft_bytes,
        )


def _leased(held: Held) -> bool:
    lock = DirectoryLock.try_exclusive(held.path)
    if lock is None:
        return True
    lock.close()
    return False
