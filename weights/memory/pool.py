"""Keeps freed segment files for reuse, because their pages are already allocated.

Processes claim and return files by rename, which only one of them can win. The pool counts against the store's budget
and is freed first.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from weights.memory import segment

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
        """All segments, oldest first; none if the directory is gone."""
        found = []
        try:
            entries = list(os.scandir(self.directory))
        except FileNotFoundError:
            return []
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # claimed by another process meanwhile
                    continue
                found.append(Pooled(Path(entry.path), status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda pooled: pooled.freed_ns)

    def give(self, path: Path) -> None:
        """Takes ownership of a file that has no readers or writers."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if status.st_size < MIN_SEGMENT_BYTES or status.st_nlink != 1:
            segment.destroy(path)
            return
        os.utime(path)
        self.directory.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
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
