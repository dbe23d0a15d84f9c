"""Reserves draft directories within the store's bounds, allocates the memory of their files, and discards them."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

from weights.format.layout import Layout
from weights.memory import segment
from weights.memory.evictor import Evictor
from weights.memory.locks import DirectoryLock
from weights.memory.removal import dismantle_unheld


class Drafts:
    """The drafts of one store root, within the bounds of `evictor`."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor

    def path(self, name: str) -> Path:
        """Path of a draft of this name until its commit."""
        return self._evictor.staging / name

    def stake(self, layout: Layout, needed_bytes: int, name: str | None = None) -> tuple[Path, DirectoryLock]:
        """A locked draft directory whose files have their sizes, counted against the budget. Raises StoreFull."""
        path = self.path(name or uuid.uuid4().hex)
        with self._evictor.mutex():
            if self._evictor.budget_bytes is not None:
                self._evictor.make_room(needed_bytes)
            path.mkdir(mode=0o700)
            lock = DirectoryLock.try_shared(path)
            assert lock is not None, "nobody else removes drafts while we hold the mutex"
            try:
                for file in layout.files:
                    if not self._evictor.pool.claim(file.nbytes, path / file.name):
                        segment.create(lock.fd, file.name, file.nbytes)
                self._evictor.trim(needed_bytes - layout.nbytes)
            except BaseException:
                lock.close()
                self.discard(path)
                raise
        return path, lock

    def allocate(self, layout: Layout, directory_fd: int, needed_bytes: int) -> None:
        """Allocates the files' memory. Raises OSError ENOSPC if eviction did not help."""
        for file in layout.files:
            try:
                segment.allocate(directory_fd, file.name)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # The file system is fuller than the budget assumes: free the pool and evictable versions.
                with self._evictor.mutex():
                    self._evictor.evict(needed_bytes)
                    self._evictor.pool.trim(0)
                segment.allocate(directory_fd, file.name)

    def discard(self, path: Path) -> None:
        """Removes an unlocked draft; its segments go back to the system."""
        dismantle_unheld(path)
