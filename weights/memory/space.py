"""Keeps a store within its bounds: counts, reserves, evicts, sweeps, trims.

Methods with an underscore are called under the store's mutex: then a lock probe never looks like a lease to another
process, and no space is allocated twice.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from weights.format.errors import StoreFull
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


class Space:
    """The bounds of the store at `root`, which is there; it holds no state beyond them."""

    def __init__(self, root: Path, *, budget_bytes: int | None, pool_bytes: int | None) -> None:
        self.root, self.staging, self.pool = root, root / "staging", Pool(root / "pool")
        self.budget_bytes, self.pool_bytes = budget_bytes, pool_bytes
        for directory in (*(root / f"{kind}s" for kind in KINDS), self.staging, self.pool.directory):
            if not directory.is_dir():  # where memory is full, one that is there is enough
                directory.mkdir(mode=0o700, exist_ok=True)

    def mutex(self) -> AbstractContextManager[None]:
        """Hold this context manager while counting and allocating space."""
        return store_mutex(self.root / ".mutex")

    def usage(self) -> Usage:
        """What the store holds now, in bytes of file sizes (what is reserved counts as held)."""
        return Usage(
            committed_bytes=sum(held.nbytes for held in self._all_committed()),
            draft_bytes=sum(held.nbytes for path in directories(self.staging) if (held := _held_at(path)) is not None),
            pool_bytes=sum(pooled.nbytes for pooled in self.pool.files()),
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
        in_memory, in_budget = shutil.disk_usage(self.root).free + self.usage().pool_bytes, self._free_bytes()
        return (in_memory if in_budget is None else min(in_memory, in_budget)) + self.evictable_bytes()

    def full(self, needed_bytes: int) -> StoreFull:
        """The StoreFull error, with its numbers, for a caller that writes this many bytes beside the versions here."""
        with self.mutex():
            return self._full(needed_bytes)

    def _full(self, needed_bytes: int) -> StoreFull:
        usage, committed = self.usage(), self._all_committed()
        budget = "none" if self.budget_bytes is None else f"{self.budget_bytes} bytes"
        leased_bytes = sum(held.nbytes for held in committed if _leased(held))
        pinned_bytes = sum(held.nbytes for held in committed if held.pinned)
        return StoreFull(
            f"no room for {needed_bytes} bytes: budget {budget}, in use {usage.used_bytes} bytes "
            f"(leased {leased_bytes}, without a copy on disk {pinned_bytes}, being written {usage.draft_bytes}), "
            f"free on the file system {shutil.disk_usage(self.root).free} bytes. Release or remove a version, persist "
            "one so that it can be evicted, or raise the memory budget"
        )

    def _committed(self, kind: str, model: str | None = None) -> list[Path]:
        """Directories of all versions of `kind`, or of those of one model."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def _all_committed(self) -> list[Held]:
        """Sizes of every version and snapshot, the least recently used first."""
        found = (_held_at(path) for kind in KINDS for path in self._committed(kind))
        return sorted((held for held in found if held is not None), key=lambda held: held.last_used_ns)

    def _free_bytes(self) -> int | None:
        """Budget that versions and drafts leave; the pool counts as free, for it can be freed. None: no budget."""
        usage = self.usage()
        return None if self.budget_bytes is None else self.budget_bytes - usage.committed_bytes - usage.draft_bytes

    def _stake(self, path: Path, sizes: Mapping[str, int], needed_bytes: int) -> DirectoryLock:
        """Makes the draft directory `path`, locked, with segments of these sizes by name, counted against the budget.
        Raises StoreFull."""
        self._make_room(needed_bytes)
        path.mkdir(mode=0o700)
        lock = DirectoryLock.try_shared(path)
        assert lock is not None, "nobody else removes drafts while we hold the mutex"
        try:
            for name, nbytes in sizes.items():
                if not self.pool.claim(nbytes, path / name):
                    segment.create(lock.fd, name, nbytes)
            self._trim(needed_bytes - sum(sizes.values()))
        except BaseException:
            lock.close()
            self.pool.take_unheld(path, keep=False)
            raise
        return lock

    def _make_room(self, needed_bytes: int) -> None:
        """Sweeps and evicts until `needed_bytes` fit beside what must stay. Raises StoreFull, without evicting anything
        if eviction would not help."""
        free_bytes = self._free_bytes()
        if free_bytes is not None and free_bytes < needed_bytes:
            self._sweep_drafts()  # dead drafts hold budget too, and cost nothing to lose
            lacking = needed_bytes - (self._free_bytes() or 0)
            if lacking <= self._evictable_bytes():
                self._evict(lacking)
            if (self._free_bytes() or 0) < needed_bytes:
                raise self._full(needed_bytes)

    def _evictable_bytes(self) -> int:
        return sum(held.nbytes for held in self._all_committed() if not held.pinned and not _leased(held))

    def _evict(self, lacking_bytes: int) -> None:
        """Removes unleased, unpinned versions, least recently used first, until `lacking_bytes` are free or none is
        left. Their segments go to the pool."""
        for held in self._all_committed():
            if lacking_bytes <= 0:
                return
            if held.pinned or (lock := DirectoryLock.try_exclusive(held.path)) is None:
                continue
            if (held.path / PINNED_FILE).exists():  # pinned between the scan and the lock
                lock.close()
                continue
            self._take_down(held.path, lock)
            lacking_bytes -= held.nbytes

    def _take_down(self, path: Path, lock: DirectoryLock) -> None:
        """Removes the version at `path`, whose exclusive lock is `lock`, and closes the lock. One rename hides it; a
        sweep removes leftovers of a crash."""
        hidden = self.staging / f"removed-{uuid.uuid4().hex}"
        try:
            os.rename(path, hidden)
            with suppress(OSError):  # other versions of the model stay, or a commit just came
                os.rmdir(path.parent)
            dismantle(hidden, self.pool)
        finally:
            lock.close()

    def _sweep_drafts(self) -> None:
        """Removes everything unlocked in staging."""
        for entry in list(os.scandir(self.staging)):
            path = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(path)
            else:
                self.pool.take_unheld(path, keep=False)

    def _trim(self, upcoming_bytes: int) -> None:
        """Shrinks the pool to what both bounds leave beside everything else and the `upcoming_bytes` still to be
        written."""
        free_bytes = self._free_bytes()
        bounds = (self.pool_bytes, None if free_bytes is None else free_bytes - upcoming_bytes)
        if known := [bound for bound in bounds if bound is not None]:
            self.pool.trim(max(0, min(known)))


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
