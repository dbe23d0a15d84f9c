"""Allocates segment files ahead of use and maps each once per process, so that mapping it again is free.

A page fault on a tmpfs page costs more than copying the page. So a process keeps its mappings after the version that
used them is gone: when the pool reuses the file under another name, its mapping is already populated and a write runs
at memcpy rate.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Literal

import numpy as np

from weights.format.errors import IntegrityError
from weights.format.files import open_regular
from weights.memory.locks import DirectoryLock

Access = Literal["read", "write"]


class _Window(np.ndarray):
    """uint8 array over a mapping whose `keeps` (the lock) lives as long as any view of the bytes."""

    keeps: object


class _Mapped:
    """A whole-file mapping and the file, which tells whether it still has a name."""

    def __init__(self, file: io.FileIO, size: int, access: Access) -> None:
        self.file, self.size = file, size
        prot = mmap.PROT_READ if access == "read" else mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=prot)
        weakref.finalize(self, file.close)

    @property
    def named(self) -> bool:
        return os.fstat(self.file.fileno()).st_nlink > 0


# (device, inode, access) -> mapping. The open file pins the inode, so its number cannot be given to
# another file while the entry lives.
_mapped: dict[tuple[int, int, str], _Mapped] = {}
_guard = threading.Lock()


def create(path: Path, nbytes: int) -> None:
    """Creates a file (0600) of size `nbytes` without allocating its memory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def allocate(path: Path) -> None:
    """Allocates all memory of the file.

    Raises OSError ENOSPC now; ftruncate alone would overcommit the file system, and a later write would get SIGBUS.
    """
    with open(path, "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        # Skip files that are complete: posix_fallocate walks over present pages too, at a third of memcpy's cost.
        if status.st_blocks * 512 < status.st_size:
            os.posix_fallocate(file.fileno(), 0, status.st_size)


def window(path: Path, nbytes: int, access: Access, keeps: DirectoryLock | None) -> memoryview:
    """All `nbytes` of the file as a memoryview (uint8) that keeps `keeps` alive.

    "read" views are read-only; "write" views are shared with every other process. Raises IntegrityError if the file is
    no regular file of this size: a mapping past the end would be a SIGBUS.
    """
    if nbytes == 0:
        return memoryview(b"")
    file = open_regular(path.parent, path.name, "rb" if access == "read" else "r+b")
    status = os.fstat(file.fileno())
    if status.st_size != nbytes:
        file.close()
        raise IntegrityError(f"{status.st_size} bytes, expected {nbytes}", path=path.parent, file=path.name)
    with _guard:
        _forget_unnamed()
        key = (status.st_dev, status.st_ino, access)
        mapped = _mapped.get(key)
        if mapped is not None and mapped.size >= nbytes:
            file.close()
        else:
            mapped = _mapped[key] = _Mapped(file, nbytes, access)
    array = np.frombuffer(mapped.map, dtype=np.uint8, count=nbytes).view(_Window)
    array.keeps = keeps
    return memoryview(array)


def destroy(path: Path) -> None:
    """Frees the file's memory, even if some process still maps it, and then its name.

    Only for files in the pool or under an exclusively locked directory: they have no readers, but mapping caches may
    still pin the inode.
    """
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.truncate(path, 0)
        os.unlink(path)
    except FileNotFoundError:
        pass


def forget_mappings() -> None:
    """Drops this process's cached mappings; those with existing views stay mapped until the views are freed."""
    with _guard:
        _mapped.clear()


def _forget_unnamed() -> None:
    for key in [key for key, mapped in _mapped.items() if not mapped.named]:
        del _mapped[key]


def _new_guard() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_new_guard)
