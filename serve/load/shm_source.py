"""Maps a version's files as torch tensors without copying, with one mapping per file.

For a CPU the mappings are private and writable: vLLM's loaders and torch may write to tensors, and a write to a
read-only or shared page would kill the engine or corrupt the version for all readers. For a GPU the mapping is shared,
and pages that this worker copies are locked, so that copies run at the link's rate. While a driver locks or unlocks
pages, the engine's driver calls wait; so both run in pieces of LOCK_BYTES, which no copy may cross.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.devices.kind import PageLock
from runtime.processes.kernel import last_error, libc
from serve.core.errors import VersionUnreadable
from weights.format.errors import WeightsError
from weights.format.layout import Layout, Placed
from weights.format.torch_views import torch_dtype
from weights.memory.locks import DirectoryLock

FAULT_IN_BYTES = 4 * 2**20
LOCK_BYTES = 16 * 2**20
MADV_POPULATE_READ = 22  # from linux/mman.h; Python's mmap module lacks it


Spans = Mapping[str, Iterable[tuple[int, int]]]
"""Byte ranges [start, end) by file."""


@dataclass(frozen=True)
class ToLock:
    """Pages to lock. `spans`: byte ranges that a device copies from; `pages`: locks the ranges' pages."""

    spans: Spans
    pages: PageLock


def lease(path: str | Path) -> DirectoryLock:
    """Take the store's lock on a version (weights.memory.locks), which prevents eviction and reuse of its files.

    A directory outside the store may be locked too. Raises VersionUnreadable.
    """
    lock = DirectoryLock.try_shared(Path(path))
    if lock is None:
        raise VersionUnreadable(f"version directory {path} does not exist or is being removed")
    os.utime(lock.fd)  # the store evicts directories in the order of their mtime
    return lock


class VersionSource:
    """The tensors of one leased version directory. Close it when no view is in use.

    described: dtype and shape of each tensor. Raises VersionUnreadable if the directory is missing
    or is not a valid safetensors checkpoint. All headers are checked before a file is mapped.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lease = lease(self.path)
        try:
            self.layout = Layout.read(self.path)
        except (OSError, WeightsError) as error:
            raise VersionUnreadable(f"version directory {self.path} cannot be read: {error}") from error
        self._maps: dict[str, _MappedFile] = {}
        self.described = {
            placed.spec.name: torch.empty(placed.spec.shape, dtype=_dtype(self.path, placed), device="meta")
            for placed in self.layout
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(placed.nbytes for placed in self.layout)

    def map(self, to_lock: ToLock | None = None, read: Spans | None = None) -> VersionSource:
        """Map all files and fault their pages in. Call it before a pause, because fresh mappings read at half rate.

        With `to_lock` the mappings are shared and only for copies to a GPU: nothing may write into them. `read`: byte
        ranges by file that this process reads; only their pages are faulted in. None: all.
        """
        for file in self.layout.files:
            if file.name not in self._maps:
                spans = None if read is None else read.get(file.name, ())
                self._maps[file.name] = _MappedFile(self.path / file.name, to_lock, spans)
        return self

    def locked_runs(self, name: str, start: int, end: int) -> list[tuple[int, int]] | None:
        """Split bytes [start, end) of a stored tensor into runs, each of which can be copied at once; None if not all
        bytes are page-locked. Offsets count from the tensor's start."""
        placed = self.layout.find(name)
        runs = self._maps[placed.file].locked_runs(placed.start + start, placed.start + end)
        return runs and [(first - placed.start, last - placed.start) for first, last in runs]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of the mapped bytes with the stored shape and dtype; a copy if not `aligned`."""
        placed = self.layout.find(name)
        described = self.described[name]
        flat = self._maps[placed.file].bytes[placed.start : placed.end]
        if flat.data_ptr() % described.dtype.itemsize:
            flat = flat.clone()
        return flat.view(described.dtype).view(described.shape)

    def aligned(self, name: str) -> bool:
        """Return whether `tensor(name)` is a view; foreign files may hold tensors at unaligned offsets, which `tensor`
        copies."""
        placed = self.layout.find(name)
        return (self._maps[placed.file].bytes.data_ptr() + placed.start) % self.described[name].dtype.itemsize == 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors in file order, in which the tensors of one layer are adjacent."""
        for name in self.described:
            yield name, self.tensor(name)

    def close(self) -> None:
        """Unmap all files. A view in use keeps its file mapped until the view is freed."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        self._lease.close()


def _dtype(path: Path, placed: Placed) -> torch.dtype:
    try:
        return torch_dtype(placed.spec.dtype)
    except WeightsError as error:
        raise VersionUnreadable(f"{path / placed.file}: tensor {placed.spec.name}: {error}") from error


class _MappedFile:
    def __init__(self, path: Path, to_lock: ToLock | None, read: Iterable[tuple[int, int]] | None):
        descriptor = os.open(path, (os.O_RDWR if to_lock else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            share = mmap.MAP_SHARED if to_lock else mmap.MAP_PRIVATE
            mapping = mmap.mmap(descriptor, size, flags=share, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        for start, end in [(0, size)] if read is None else page_runs(read):
            _fault_in(mapping, start, min(end, size))
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._pages = to_lock and to_lock.pages
        spans = to_lock.spans.get(path.name, ()) if to_lock else ()
        address = self.bytes.data_ptr()
        self._locked = sorted(
            (start, end) for start, end in lock_pieces(spans, size) if self._pages.lock(address + start, end - start)
        )

    def locked_runs(self, start: int, end: int) -> list[tuple[int, int]] | None:
        runs: list[tuple[int, int]] = []
        index = max(0, bisect_right(self._locked, start, key=lambda run: run[0]) - 1)
        while start < end:
            if index == len(self._locked) or not self._locked[index][0] <= start < self._locked[index][1]:
                return None
            runs.append((start, min(end, self._locked[index][1])))
            start = runs[-1][1]
            index += 1
        return runs

    def close(self) -> None:
        address = self.bytes.data_ptr()
        for start, _ in self._locked:
            self._pages.unlock(address + start)
        self._locked.clear()
        # The tensor owns the mapping's buffer, so freeing the last view frees the pages.
        del self.bytes


def lock_pieces(spans: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The pages of byte ranges of a file of `size` bytes, split at multiples of LOCK_BYTES."""
    for start, end in page_runs(spans):
        end = min(end, size)
        while start < end:
            cut = min(end, (start // LOCK_BYTES + 1) * LOCK_BYTES)
            yield start, cut
            start = cut


def page_runs(spans: Iterable[tuple[int, int]], page_bytes: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Widen byte ranges to page boundaries and join adjacent ranges, because no page may be locked twice."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        start, end = start // page_bytes * page_bytes, -(-end // page_bytes) * page_bytes
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        elif start < end:
            runs.append((start, end))
    return runs


def _fault_in(mapping: mmap.mmap, first: int, last: int) -> None:
    """Fault in the pages of bytes [first, last) for reading, by a kernel call available since Linux 5.14.

    MAP_POPULATE is unsuitable: on a private writable mapping it faults for writing and so copies every page.
    `mapping.madvise` is unsuitable too: it holds the GIL and so stops the engine's steps. Each call covers a small
    range, because it holds the kernel's lock on the address space, and a step that needs memory waits for that lock.
    """
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for offset in range(first, last, FAULT_IN_BYTES):
        size = min(FAULT_IN_BYTES, last - offset)
        if libc.madvise(start + offset, size, MADV_POPULATE_READ):
            error = last_error("cannot fault in the pages of a version")
            if error.errno != errno.EINVAL:  # an older kernel faults pages in on access
                raise error
            return
