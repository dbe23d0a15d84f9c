"""Writing a snapshot or a version while training goes on.

    begin at a step boundary -> forward and backward of the next step -> finish, just before its optimizer step

Weights and moments are constant until the optimizer steps, so what is copied meanwhile is the state of one step, to the
bit. Training stands still for the reservation, for what of the copy is left when the optimizer is due, and for the
commit; never longer than the copy alone would take.
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

_SHORTEST_PAUSE_S = 0.001


@dataclass(frozen=True)
class Written:
    """A committed snapshot or version. `seconds` from begin to end, `stall_s` of them training stood still."""

    path: str
    bytes: int
    seconds: float
    stall_s: float = 0.0

    def finish(self) -> Written:
        """As `Writing.finish`, for what was there already."""
        return self


class Writing:
    """A draft that this rank is filling with its part; every rank has one and calls `finish`.

    `fill` copies piece after piece and yields the elements of each, about `elements` in all. With `pace_s` it runs on a
    thread, spread over about that many seconds; with None it runs now. It must not use collectives on a thread.
    """

    def __init__(self, draft: Any, fill: Callable[[], Iterator[int]], *, elements: int, meta: dict[str, Any],
                 began: float, pace_s: float | None = None):  # fmt: skip
        self._draft, self._meta, self._began = draft, meta, began
        self._hurry = threading.Event()
        self._filled: Future[None] | None = None
        if pace_s is None:
            _run(fill(), elements, 0.0, self._hurry)
        else:
            with_thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
            self._filled = with_thread.submit(_run, fill(), elements, pace_s, self._hurry)
            with_thread.shutdown(wait=False)
        self._stall_s = time.perf_counter() - began

    def finish(self) -> Written:
        """Collective: returns when the version is committed, the same on every rank but for the times."""
        entered = time.perf_counter()
        if self._filled is not None:
            self._hurry.set()
            self._filled.result()
        path, nbytes = commit_together(self._draft, self._meta)
        now = time.perf_counter()
        return Written(path, nbytes, now - self._began, self._stall_s + now - entered)


def commit_together(draft: Any, meta: dict[str, Any]) -> tuple[str, int]:
    """Commit on rank 0 once every rank has written; (path, bytes) on all. Rank 0's failure ends the world."""
    comm.barrier()
    if comm.get_rank() == 0:
        # Checksums would double the time the devices are held; WeightStore.seal adds them afterwards.
        stored = draft.commit(meta=meta, checksums=False)
        return str(stored.path), stored.nbytes
    draft.close()
    return str(draft.target), draft.layout.nbytes


def _run(fill: Iterator[int], elements: int, pace_s: float, hurry: threading.Event) -> None:
    started, done = time.monotonic(), 0
    with torch.no_grad():  # the mode belongs to the thread
        for piece in fill:
            done += piece
            ahead_s = pace_s * min(1.0, done / max(1, elements)) - (time.monotonic() - started)
            if ahead_s > _SHORTEST_PAUSE_S:
                hurry.wait(ahead_s)
