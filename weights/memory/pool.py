"""Removes directories of the store, and keeps their segment files for reuse, because their pages are allocated already.

Processes claim and return files by rename, which only one of them can win. The pool counts against the store's budget
and is freed first.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from weights.format.names import TENSOR_SUFFIX
from weights.memory import segment
from weights.memory.locks import DirectoryLock

_NAME = re.compile(r"[0-9a-f]{32}\.seg")
MIN_SEGMENT_BYTES = 1 << 16  # smaller files cost less to allocate than to look up


@dataclass(frozen=True)
class Pooled:
    """A file of the pool; `freed_ns` is when it was returned."""

    path: Path
    nbytes: int
    freed_ns: int


class Pool:
    """The files under one pool directory. Cheap; has no state of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(self) -> list[Pooled]:
        """All segments, oldest first."""
        found = []
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # claimed by another process meanwhile
                    continue
                found.append(Pooled(Path(entry.path), status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda pooled: pooled.freed_ns)

    def give(self, path: Path) -> None:
        """Takes ownership of a file that has no readers or writers."""
        status = os.lstat(path)
        if status.st_size < MIN_SEGMENT_BYTES or status.st_nlink != 1:
            segment.destroy(path)
            return
        os.utime(path)
        os.rename(path, self.directory / f"{uuid.uuid4().hex}.seg")

    def claim(self, nbytes: int, target: Path) -> bool:
        """Moves the best segment for a file of `nbytes` to `target` with exactly that size; False if none."""
        while (pooled := best_fit(self.files(), nbytes)) is not None:
            try:
                os.rename(pooled.path, target)
            except FileNotFoundError:
                continue
            os.truncate(target, nbytes)
            return True
        return False

    def trim(self, keep_bytes: int) -> int:
        """Deletes the oldest segments until at most `keep_bytes` are left; returns the bytes freed."""
        files = self.files()
        total = sum(pooled.nbytes for pooled in files)
        freed = 0
        for pooled in files:
            if total - freed <= keep_bytes:
                break
            segment.destroy(pooled.path)
            freed += pooled.nbytes
        return freed

    def take_unheld(self, directory: Path, *, keep: bool) -> bool:
        """Removes `directory` unless a living process holds it or it is gone; returns whether it did. Its tensor files
        come here if it should `keep` them, else their memory is freed."""
        lock = DirectoryLock.try_exclusive(directory)
        if lock is None:
            return False
        try:
            dismantle(directory, self if keep else None)
        finally:
            lock.close()
        return True


def dismantle(directory: Path, pool: Pool | None) -> None:
    """Removes `directory`, whose exclusive lock the caller holds. Its tensor files go to `pool`; without one their
    memory is freed."""
    for entry in list(os.scandir(directory)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(path)
        elif entry.name.endswith(TENSOR_SUFFIX) and entry.is_file(follow_symlinks=False):
            pool.give(path) if pool is not None else segment.destroy(path)
        else:
            os.unlink(path)
    os.rmdir(directory)


def best_fit(files: list[Pooled], nbytes: int) -> Pooled | None:
    """The segment whose pages serve `nbytes` best. Pure.

    Exact size first, the most recently freed (a writer most likely still has it mapped); then the smallest larger one,
    truncated; then the largest smaller one, extended.
    """
    if nbytes < MIN_SEGMENT_BYTES:
        return None
    exact = [pooled for pooled in files if pooled.nbytes == nbytes]
    if exact:
        return max(exact, key=lambda pooled: pooled.freed_ns)
    larger = [pooled for pooled in files if pooled.nbytes > nbytes]
    if larger:
        return min(larger, key=lambda pooled: pooled.nbytes)
    return max(files, key=lambda pooled: pooled.nbytes, default=None)
