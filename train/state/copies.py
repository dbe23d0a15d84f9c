"""Copies a rank's memory to and from the files of a snapshot or a version, cast to the dtype of the target. All
ranks write one draft together.

Contiguous elements are copied by system calls: in a new process a mapping of shared memory takes a page fault for every
4 KiB, which costs twice the copy itself. Columns of a matrix are copied through a mapping.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import in_host_memory, of_torch
from train.control.rank import barrier, broadcast_json
from weights.format.errors import StoreFull
from weights.format.layout import Layout, Placed
from weights.format.torch_views import Strided, as_tensor, runs_view, torch_dtype
from weights.memory.store import WeightStore

_PART_BYTES = 4 << 20  # size of one buffer in a staging ring
BUFFERS = 8
THREADS = 3  # threads per rank; ranks share the box's memory bandwidth
Piece = tuple[str, Strided, torch.Tensor]
"""The name of a stored tensor, a selection of its elements, and this rank's memory for them: (n,), contiguous."""
HostCopy = Callable[[torch.Tensor], None]
"""Reads the elements of a buffer on the host, or fills them."""


@dataclass(frozen=True)
class Written:
    """A committed snapshot or version; `seconds`: time that training on this rank waited for it."""

    path: str
    bytes: int
    seconds: float


def write_together(
    store: WeightStore, layout: Layout, reserve: Callable[[], Any], pieces: Iterable[Piece], meta: dict[str, Any]
) -> Written:
    """Collective: rank 0 calls `reserve()` for a draft, every rank writes its pieces into it, and rank 0 commits it
    when all have written. If a rank dies before, the draft is never committed. Errors free the draft's memory.

    Raises StoreFull, on every rank, if memory has no space for the draft or for its manifest.
    """
    began_s, rank, draft = time.perf_counter(), distributed.get_rank(), None

    def agreed(act: Callable[[], dict[str, Any]]) -> Any:
        """Run `act` on rank 0; return the result on every rank. Raises StoreFull on every rank."""
        outcome = {}
        try:
            outcome = act() if rank == 0 else {}
        except (StoreFull, OSError) as error:
            if not isinstance(error, StoreFull) and error.errno != errno.ENOSPC:
                raise
            outcome = {"full": str(error)}
        outcome = broadcast_json(outcome)
        if "full" in outcome:
            raise StoreFull(outcome["full"])
        return outcome

    def reserved() -> dict[str, Any]:
        nonlocal draft
        draft = reserve()
        return {"draft": str(draft.path)}

    def committed() -> dict[str, Any]:
        stored = draft.commit(meta=meta)
        return {"path": str(stored.path), "bytes": stored.nbytes}

    place = agreed(reserved)["draft"]
    if draft is None:
        draft = store.attach(place, layout)
    try:
        with torch.no_grad():
            write(draft, pieces)
        barrier()
        if rank > 0:
            draft.close()  # an open mapping would keep the memory after a failed commit
        return Written(**agreed(committed), seconds=time.perf_counter() - began_s)
    finally:
        draft.close()  # on rank 0 closing frees an uncommitted draft


def write(draft: Any, pieces: Iterable[Piece]) -> None:
    with _Files(draft, os.O_WRONLY) as files:
        for name, runs, ours in pieces:
            placed, dtype = files.placed(name)
            if runs.count > 1:
                files.columns(placed, runs).copy_(ours.to(dtype).view(runs.count, runs.run))
                continue
            for at, part in _parts(runs, ours, dtype):
                put = partial(_repeat, os.pwritev, files.fd(placed.file), placed.start + at * dtype.itemsize)
                if in_host_memory(part.device):
                    put(part.to(dtype))
                else:
                    files.ring(part.device).to_host(part.to(dtype), put)


def read(lease: Any, pieces: Iterable[Piece]) -> None:
    with _Files(lease, os.O_RDONLY) as files:
        for name, runs, ours in pieces:
            placed, dtype = files.placed(name)
            if runs.count > 1:
                ours.view(runs.count, runs.run).copy_(files.columns(placed, runs))
                continue
            for at, part in _parts(runs, ours, dtype):
                get = partial(_repeat, os.preadv, files.fd(placed.file), placed.start + at * dtype.itemsize)
                if not in_host_memory(part.device):
                    files.ring(part.device).to_device(part, get, dtype)
                elif part.dtype == dtype:
                    get(part)
                else:
                    get(buffer := torch.empty_like(part, dtype=dtype))
                    part.copy_(buffer)


class _Files:
    """The open files of a draft or a lease, and a staging ring for each device."""

    def __init__(self, handle: Any, flags: int):
        self._handle, self._flags, self._copying = handle, flags, ExitStack()
        self._fds: dict[str, int] = {}
        self._rings: dict[torch.device, StagingRing] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._copying.__exit__(*error)
        finally:  # close files last: the threads of a ring use them until the ring ends
            for fd in self._fds.values():
                os.close(fd)

    def placed(self, name: str) -> tuple[Placed, torch.dtype]:
        placed = self._handle.layout.find(name)
        return placed, torch_dtype(placed.spec.dtype)

    def columns(self, placed: Placed, runs: Strided) -> torch.Tensor:
        spec = placed.spec
        return runs_view(as_tensor(self._handle.view(spec.name), spec.dtype, (spec.numel,)), runs)

    def fd(self, file: str) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(self._handle.path / file, self._flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._fds[file]

    def ring(self, device: torch.device) -> StagingRing:
        if device not in self._rings:
            self._rings[device] = self._copying.enter_context(StagingRing(of_torch(device), _PART_BYTES // 4))
        return self._rings[device]


def _parts(runs: Strided, ours: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Split `ours` into parts of a buffer's size, each with the index of its first element in the stored tensor."""
    most = _PART_BYTES // dtype.itemsize
    for first in range(0, runs.run, most):
        yield runs.start + first, ours[first : first + most]


def _repeat(call: Callable[[int, list[memoryview], int], int], fd: int, at: int, memory: torch.Tensor) -> None:
    """Repeat `call` until it has copied all of `memory`, a tensor on the host."""
    rest = memoryview(memory.detach().view(torch.uint8).numpy())
    while rest:
        count = call(fd, [rest], at)
        if count == 0:
            raise EOFError(f"a file ends at byte {at} of a tensor")
        rest, at = rest[count:], at + count


class StagingRing:
    """Copies between a device and pageable host memory through a ring of page-locked buffers, `elements` float32 each.
    Use it from one thread; the device copies in its current stream. Leaving the context waits for all copies. The
    error of a failed copy is raised then or in an earlier call.

    A GPU copies only to and from page-locked memory. For other memory the driver uses a small buffer of its own, which
    one thread fills while the link waits: 10 to 17 GB/s instead of 55 (H200, DeepSpeed's pull request 8283). A
    snapshot's mapping is too large to be locked for a single use. Here the link fills one buffer while threads empty
    the other buffers.
    """

    def __init__(self, kind: DeviceKind, elements: int):
        self._kind = kind
        # Each buffer has a function that waits until the buffer may be reused.
        self._free: deque[tuple[torch.Tensor, Callable[[], Any]]] = deque(
            (kind.locked_buffer(elements), lambda: None) for _ in range(BUFFERS)
        )
        self._filled: deque[tuple[Future[None], torch.Tensor, torch.Tensor, torch.Tensor]] = deque()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")

    def __enter__(self) -> StagingRing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                while self._filled:
                    self._send()
                for _, over in self._free:
                    over()
        finally:
            self._threads.shutdown()

    def to_host(self, source: torch.Tensor, take: HostCopy) -> None:
        """Begin a copy of `source` (n,) from the device; `take` receives the elements on the host."""
        buffer, over = self._free.popleft()
        over()
        part = buffer.view(source.dtype)[: source.numel()]
        part.copy_(source, non_blocking=True)
        arrived = self._kind.mark()

        def land() -> None:
            arrived()
            take(part)

        self._free.append((buffer, self._threads.submit(land).result))

    def to_device(self, target: torch.Tensor, fill: HostCopy, dtype: torch.dtype) -> None:
        """Begin a copy to `target` (n,) on the device; `fill` provides the elements in `dtype` on the host."""
        while len(self._filled) > BUFFERS // 2:
            self._send()
        buffer, over = self._free.popleft()
        over()
        part = buffer.view(dtype)[: target.numel()]
        self._filled.append((self._threads.submit(fill, part), buffer, part, target))

    def _send(self) -> None:
        filling, buffer, part, target = self._filled.popleft()
        filling.result()
        # Cast on the device: torch would cast on the host, through a buffer that is not page-locked.
        target.copy_(
            part if part.dtype == target.dtype else part.to(target.device, non_blocking=True), non_blocking=True
        )
        self._free.append((buffer, self._kind.mark()))
