"""Allocates segment files ahead of use, maps each file once per process, and pools freed segments for reuse.

A page fault on a new tmpfs page costs more than copying the page. So the pool reuses freed files under other names, and
a process keeps a mapping after its version is removed: writes through a populated mapping run at memcpy rate.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
import uuid
import weakref
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import numpy as np

from weights.format.errors import IntegrityError
from weights.format.names import TENSOR_SUFFIX, open_regular
from weights.memory.locks import DirectoryLock

Access = Literal["read", "write"]
MIN_SEGMENT_BYTES = 1 << 16  # smaller files are not pooled: allocating is faster than looking up


class _Window(np.ndarray):
    """A uint8 array over a mapping; the lock in `keeps` lives as long as any view of the bytes."""

    keeps: object


class _Mapping:
    """A mapping of an entire file, and the open file, whose link count shows whether it is unlinked."""

    def __init__(self, file: io.FileIO, size: int, access: Access) -> None:
        self.file, self.size = file, size
        prot = mmap.PROT_READ if access == "read" else mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=prot)
        weakref.finalize(self, file.close)


# (device, inode, access) -> mapping. The open file pins the inode, so its number cannot be reused while the entry
# lives.
mappings: dict[tuple[int, int, str], _Mapping] = {}
_guard = threading.Lock()


def create(path: Path, nbytes: int) -> None:
    """Create a file (mode 0600) of size `nbytes` without allocating memory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def allocate(path: Path) -> None:
    """Allocates all memory of the file.

    Raises OSError ENOSPC at once; after ftruncate alone a later write to a full file system would get SIGBUS.
    """
    with open(path, "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        # Skip complete files: posix_fallocate also walks allocated pages, which takes a third of the time of memcpy.
        if status.st_blocks * 512 < status.st_size:
            os.posix_fallocate(file.fileno(), 0, status.st_size)


def window(path: Path, nbytes: int, access: Access, keeps: DirectoryLock | None) -> memoryview:
    """Return all `nbytes` of the file as a memoryview (uint8) that keeps the lock `keeps` alive.

    "read" views are read-only; "write" views are shared with every other process. Raises IntegrityError if the file is
    not a regular file of this size: access past its end would be a SIGBUS.
    """
    if nbytes == 0:
        return memoryview(b"")
    file = open_regular(path.parent, path.name, "rb" if access == "read" else "r+b")
    status = os.fstat(file.fileno())
    if status.st_size != nbytes:
        file.close()
        raise IntegrityError(f"{status.st_size} bytes, expected {nbytes}", path=path.parent, file=path.name)
    with _guard:
        for key in [key for key, known in mappings.items() if os.fstat(known.file.fileno()).st_nlink == 0]:
            del mappings[key]
        key = (status.st_dev, status.st_ino, access)
        mapping = mappings.get(key)
        if mapping is not None and mapping.size >= nbytes:
            file.close()
        else:
            mapping = mappings[key] = _Mapping(file, nbytes, access)
    array = np.frombuffer(mapping.map, dtype=np.uint8, count=nbytes).view(_Window)
    array.keeps = keeps
    return memoryview(array)


def _new_guard() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_new_guard)


class Pool:
    """The freed segment files in one directory, which is the pool's only state. Processes claim and return files by
    rename, which succeeds for only one process. Pooled files count against the store's budget and are freed first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(self) -> list[tuple[Path, int]]:
        """Return all segments with their sizes in bytes, the earliest freed first."""
        files = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):  # another process claimed the file meanwhile
                status = path.lstat()
                files.append((status.st_mtime_ns, path, status.st_size))
        return [(path, nbytes) for _, path, nbytes in sorted(files)]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.files())

    def claim(self, nbytes: int, target: Path) -> bool:
        """Move the segment that fits `nbytes` best to `target` and set its size; False if there is none, or for less
        than MIN_SEGMENT_BYTES. Order: the last freed segment of that size (most likely still mapped by a writer); the
        smallest larger segment, truncated; the largest smaller segment, extended."""
        while nbytes >= MIN_SEGMENT_BYTES and (files := self.files()):
            path, _ = min(reversed(files), key=lambda file: (file[1] < nbytes, abs(file[1] - nbytes)))
            with suppress(FileNotFoundError):
                os.rename(path, target)
                os.truncate(target, nbytes)
                return True
        return False

    def trim(self, keep_bytes: float) -> None:
        """Delete the earliest freed segments until at most `keep_bytes` bytes remain."""
        files = self.files()
        excess = sum(nbytes for _, nbytes in files) - keep_bytes
        for path, nbytes in files:
            if excess <= 0:
                break
            _destroy(path)
            excess -= nbytes

    def take_unheld(self, directory: Path, *, keep: bool) -> None:
        """Remove `directory` unless it is locked by a process or gone. keep: move the tensor files to the pool instead
        of freeing their memory."""
        if (lock := DirectoryLock.try_exclusive(directory)) is not None:
            with closing(lock):
                self.dismantle(directory, keep=keep)

    def dismantle(self, directory: Path, *, keep: bool) -> None:
        """Remove like `take_unheld` a directory whose exclusive lock the caller holds."""
        for entry in list(os.scandir(directory)):
            path = Path(entry.path)
            if not entry.name.endswith(TENSOR_SUFFIX) or entry.is_symlink():
                path.unlink()
            elif keep and entry.stat().st_size >= MIN_SEGMENT_BYTES:
                os.utime(path)
                os.rename(path, self.directory / f"{uuid.uuid4().hex}.seg")
            else:
                _destroy(path)
        os.rmdir(directory)


def _destroy(path: Path) -> None:
    """Frees the memory of a file without readers, then unlinks it: a cached mapping may still pin the inode."""
    with suppress(FileNotFoundError):
        os.truncate(path, 0)
        os.unlink(path)
