"""Keeps a store within its bounds: counts, reserves, evicts, sweeps, trims.

Methods with an underscore are called under the store's mutex: then a lock probe never looks like a lease to another
process, and no space is allocated twice.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weights.format.errors import StoreFull
from weights.format.names import KINDS, PINNED_FILE, encode_name
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


class Space:
    """The bounds of the store at `root`, which is there; it holds no state beyond them."""

    def __init__(self, root: Path, *, budget_bytes: int | None, pool_bytes: int | None) -> None:
        self.root, self.staging, self.pool = root, root / "staging", Pool(root / "pool")
        self.budget_bytes, self.pool_bytes = budget_bytes, pool_bytes
        for directory in (*(root / f"{kind}s" for kind in KINDS), self.staging, self.pool.directory):
            if not directory.is_dir():  # where memory is full, one that is there is enough
                directory.mkdir(mode=0o700, exist_ok=True)

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

    def _committed(self, kind: str, model: str | None = None) -> list[Path]:
        """Directories of all versions of `kind`, or of those of one model."""
        of_kind = self.root / f"{kind}s"
        models = directories(of_kind) if model is None else [of_kind / encode_name(model)]
        return [path for folder in models for path in directories(folder)]

    def _all_committed(self) -> list[Held]:
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
                path.unlink()
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
