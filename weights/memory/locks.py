"""Implements file locks that end when the holding process ends.

`flock` on a directory needs no lock file and follows the directory through renames. The kernel releases the lock when
its last descriptor closes, so also at kill -9. A forked child would share the descriptor and hold a dead parent's lock:
children therefore close inherited descriptors.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

# Seconds that a shared lock waits for another process's probe or removal, which takes microseconds.
SHARED_WAIT_S = 2.0
SHARED_POLL_S = 0.001


class DirectoryLock:
    """A shared or exclusive lock on a directory, held until `close` or until the last reference is freed.

    Use `try_shared` or `try_exclusive`. Mappings hold a reference, so that bytes under a view are never reused.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def try_shared(cls, directory: Path) -> DirectoryLock | None:
        """Take a shared lock on `directory`; None if the directory is gone or being removed."""
        deadline_s = time.monotonic() + SHARED_WAIT_S
        while True:
            try:
                return cls._take(directory, fcntl.LOCK_SH)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    return None
                time.sleep(SHARED_POLL_S)

    @classmethod
    def try_exclusive(cls, directory: Path) -> DirectoryLock | None:
        """Take the exclusive lock on `directory`; None if the directory is locked or gone."""
        try:
            return cls._take(directory, fcntl.LOCK_EX)
        except BlockingIOError:
            return None

    @classmethod
    def _take(cls, directory: Path, operation: int) -> DirectoryLock | None:
        """Take the lock; None if the directory is gone. Raises BlockingIOError if it is locked or was replaced."""
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            # between open and flock another process may have renamed the directory to remove it
            if not os.path.samestat(os.fstat(fd), os.lstat(directory)):
                raise BlockingIOError(f"{directory} was replaced")
        except FileNotFoundError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    @property
    def held(self) -> bool:
        return self._fd is not None

    @property
    def fd(self) -> int:
        """The directory's descriptor, while the lock is held."""
        assert self._fd is not None
        return self._fd

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        # interpreter shutdown may clear this module before it frees the last lock
        if os is not None and getattr(self, "_fd", None) is not None:
            self.close()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_drop_inherited)
