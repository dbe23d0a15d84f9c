"""Removes directories of the store, and keeps their segment files for reuse, because their pages are allocated already.

Processes claim and return files by rename, which only one of them can win. The pool counts against the store's budget
and is freed first.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import closing
from pathlib import Path

from weights.format.names import TENSOR_SUFFIX
from weights.memory import segment
from weights.memory.locks import DirectoryLock

MIN_SEGMENT_BYTES = 1 << 16  # smaller files cost less to allocate than to look up


class Pool:
    """The files under one pool directory. Cheap; has no state of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(self) -> list[tuple[Path, int]]:
        """All segments with their bytes, the first freed first."""
        files = []
        for path in self.directory.iterdir():
            try:
                status = path.lstat()
            except FileNotFoundError:  # claimed by another process meanwhile
                continue
            files.append((status.st_mtime_ns, path, status.st_size))
        return [(path, nbytes) for _, path, nbytes in sorted(files)]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.files())

    def give(self, path: Path) -> None:
        """Takes ownership of a file that has no readers or writers."""
        status = os.lstat(path)
        if status.st_size < MIN_SEGMENT_BYTES or status.st_nlink != 1:
            segment.destroy(path)
            return
        os.utime(path)
        os.rename(path, self.directory / f"{uuid.uuid4().hex}.seg")

    def claim(self, nbytes: int, target: Path) -> bool:
        """Moves the segment whose pages serve a file of `nbytes` best to `target`, with exactly that size; False if
        there is none. An exact size is best, the last freed (a writer most likely still has it mapped); then the
        smallest larger one, truncated; then the largest smaller one, extended."""
        while nbytes >= MIN_SEGMENT_BYTES and (files := self.files()):
            path, _ = min(reversed(files), key=lambda file: (file[1] < nbytes, abs(file[1] - nbytes)))
            try:
                os.rename(path, target)
            except FileNotFoundError:
                continue
            os.truncate(target, nbytes)
            return True
        return False

    def trim(self, keep_bytes: float) -> int:
        """Deletes the oldest segments until at most `keep_bytes` are left; returns the bytes freed."""
        files, freed = self.files(), 0
        excess = sum(nbytes for _, nbytes in files) - keep_bytes
        for path, nbytes in files:
            if freed >= excess:
                break
            segment.destroy(path)
            freed += nbytes
        return freed

    def take_unheld(self, directory: Path, *, keep: bool) -> None:
        """Removes `directory` unless a living process holds it or it is gone. Its tensor files come here if it should
        `keep` them, else their memory is freed."""
        if (lock := DirectoryLock.try_exclusive(directory)) is not None:
            with closing(lock):
                self.dismantle(directory, keep=keep)

    def dismantle(self, directory: Path, *, keep: bool) -> None:
        """As `take_unheld`, of a directory whose exclusive lock the caller holds."""
        for entry in list(os.scandir(directory)):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(path)
            elif entry.name.endswith(TENSOR_SUFFIX) and entry.is_file(follow_symlinks=False):
                self.give(path) if keep else segment.destroy(path)
            else:
                os.unlink(path)
        os.rmdir(directory)
