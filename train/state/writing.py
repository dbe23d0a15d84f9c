"""Writes a snapshot or a version while training continues.

    begin at a step boundary -> forward and backward of the next step -> copied, just before its optimizer step
    -> finish, at its end

Weights and moments are constant until the optimizer steps, so the copy is exactly the state of one step. Training
stalls for the reservation, for the rest of the copy when the optimizer is due, and for the commit; never longer than
the copy alone would take.

Only rank 0 waits for other ranks: it commits when all have marked their part as written. Another rank may free its
memory or continue training at once. If a rank dies before its mark, the draft is never committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm

from runtime.devices.kinds import copy_streams

_SHORTEST_PAUSE_S = 0.001


@dataclass(frozen=True)
class Written:
    """A committed snapshot or version. `seconds` from begin to end, `stall_s` of them training stood still, on this
    rank; `beside_s` is what the copy beside training took of a processor."""

    path: str
    bytes: int
    seconds: float
    stall_s: float = 0.0
    beside_s: float = 0.0

    def copied(self) -> None:
        """Like `Writing.copied`, for an existing version."""

    def finish(self) -> Written:
        """Like `Writing.finish`, for an existing version."""
        return self


class Writing:
    """A draft that this rank is filling with its part; every rank has one and calls `copied`, `finish` or both.

    `fill` copies piece after piece and yields the elements of each, about `elements` in all. With `pace_s` it runs on a
    thread, spread over about that many seconds; with None it runs now. It must not use collectives on a thread.
    """

    def __init__(
        self,
        draft: Any,
        fill: Callable[[], Iterator[int]],
        *,
        elements: int,
        meta: dict[str, Any],
        began: float,
        pace_s: float | None = None,
    ):
        self._draft, self._meta, self._began = draft, meta, began
        self._elements = elements
        self._hurry = threading.Event()
        self._filled: Future[None] | None = None
        self._marked = False
        self._beside_s = 0.0
        if pace_s is None:
            self._run(fill(), 0.0)
        else:
            with_thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
            self._filled = with_thread.submit(self._run_beside, fill(), pace_s)
            with_thread.shutdown(wait=False)
        self._stall_s = time.perf_counter() - began

    def copied(self) -> None:
        """Return when this rank's part is written: its state may then change or be freed."""
        if self._marked:
            return
        entered = time.perf_counter()
        if self._filled is not None:
            self._hurry.set()
            self._filled.result()
        self._draft.mark_written(comm.get_rank())
        self._marked = True
        self._stall_s += time.perf_counter() - entered

    def finish(self) -> Written:
        """On rank 0 returns when the version is committed, for which it waits for every rank's part; on the others at
        once. Rank 0's failure ends the world."""
        self.copied()
        entered = time.perf_counter()
        if comm.get_rank() == 0:
            self._draft.wait_written()
            # Checksums would double the time the devices are held; WeightStore.seal adds them afterwards.
            stored = self._draft.commit(meta=self._meta, checksums=False)
            path, nbytes = stored.path, stored.nbytes
        else:
            path, nbytes = self._draft.target, self._draft.layout.nbytes
            self._draft.close()
        now = time.perf_counter()
        return Written(str(path), nbytes, now - self._began, self._stall_s + now - entered, self._beside_s)

    def abort(self) -> None:
        """After `finish` failed, on rank 0: free what was written."""
        self._draft.abort()

    def _run_beside(self, fill: Iterator[int], pace_s: float) -> None:
        began_s = time.thread_time()
        self._run(fill, pace_s)
        self._beside_s = time.thread_time() - began_s

    def _run(self, fill: Iterator[int], pace_s: float) -> None:
        started, done = time.monotonic(), 0
        with torch.no_grad(), copy_streams():  # both belong to the thread
            for piece in fill:
                done += piece
                ahead_s = pace_s * min(1.0, done / max(1, self._elements)) - (time.monotonic() - started)
                if ahead_s > _SHORTEST_PAUSE_S:
                    self._hurry.wait(ahead_s)
