"""Provides views of a directory's tensor files while a lock on the directory is held.

Draft and lease share this: it maps a file on first use, and each view keeps the lock.
"""

from __future__ import annotations

from pathlib import Path

from weights.format.errors import HandleClosed
from weights.format.layout import Layout
from weights.memory import segment
from weights.memory.locks import DirectoryLock


class Mapped:
    """`path` is the directory, `layout` that of its files, `access` how they are mapped (see weights.memory.segment).

    A process forked meanwhile does not hold the lock and cannot map anything.
    """

    def __init__(self, path: Path, layout: Layout, lock: DirectoryLock, access: segment.Access) -> None:
        self.path = path
        self.layout = layout
        self._lock: DirectoryLock | None = lock
        self._access: segment.Access = access
        self._windows: dict[str, memoryview] = {}

    def view(self, name: str) -> memoryview:
        """Bytes of tensor `name` (uint8, 1-D). The view keeps the directory locked while it exists, even after this is
        closed. Raises UnknownTensor, HandleClosed."""
        placed = self.layout.find(name)
        return self.file_view(placed.file)[placed.start : placed.end]

    def file_view(self, file: str) -> memoryview:
        """As `view`, of a whole file with its header, for callers that use the layout's offsets."""
        lock = self._open_lock()
        if file not in self._windows:
            self._windows[file] = segment.window(self.path / file, self.layout.file(file).nbytes, self._access, lock)
        return self._windows[file]

    @property
    def _held(self) -> bool:
        return self._lock is not None and self._lock.held

    def _open_lock(self) -> DirectoryLock:
        if self._lock is None or not self._lock.held:
            raise HandleClosed(self._closed())
        return self._lock

    def _let_go(self) -> DirectoryLock | None:
        """Drops lock and mappings. Returns the lock if it was held; freeing the last reference unlocks the
        directory."""
        lock, self._lock, self._windows = self._lock, None, {}
        return lock if lock is not None and lock.held else None

    def _closed(self) -> str:
        """The error for access after close: why, and what to do."""
        raise NotImplementedError
