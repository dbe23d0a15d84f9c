"""Lets all ranks of a world leave a running step at the same point, without waiting for each other.

A step has points (train.run.leave_step): the beginning of each micro-batch, of each layer's forward and backward. Every
rank passes the same points in the same order, with the same collectives between them. If all leave at one point, no
collective is left half done, and nobody waits for a rank that has gone.

    rank, at each point:   write the point's number -> look whether leaving was announced -> leave if this is the point
    rank 0, when asked:    announce -> read the numbers of all ranks -> the point is the one after the highest

A rank that did not see the announcement had written its number before, so rank 0 has read it and nobody is beyond the
point (Dekker's argument: each side writes before it reads). A rank that saw it waits until the point is named, for as
long as rank 0 takes to read a page.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

_BYTES = mmap.PAGESIZE
_ANNOUNCED, _POINT, _LEFT, _RANKS = 0, 1, 2, 8  # places in the page, int64
POINTS_PER_STEP = 1 << 24
MOST_RANKS = _BYTES // 8 - _RANKS
_SEEN_S = 0.001
"""A processor may reorder a read before its own earlier write, for less than a microsecond. After this time rank 0 sees
the writes of all ranks that did not see the announcement."""


class StopPoint:
    """One rank's view of the page, which is a file in the job's directory that all ranks of the node map.

    It persists across worlds for `left`: the step (steps done before it) that was left last, -1 if none.
    """

    def __init__(self, folder: Path, rank: int, world_size: int):
        if world_size > MOST_RANKS:
            raise ValueError(f"{world_size} ranks; a page has room for {MOST_RANKS}")
        self._rank, self._world_size = rank, world_size
        path = folder / "stop-point"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fresh = os.fstat(descriptor).st_size < _BYTES
            os.ftruncate(descriptor, _BYTES)
            self._page = np.frombuffer(mmap.mmap(descriptor, _BYTES), dtype=np.int64)
        finally:
            os.close(descriptor)
        if fresh and rank == 0:
            self._page[_LEFT] = -1

    def reset(self) -> None:
        """Called by rank 0 before any rank of this world begins a step."""
        self._page[_ANNOUNCED] = self._page[_POINT] = 0
        self._page[_RANKS:] = 0

    @property
    def left(self) -> int:
        return int(self._page[_LEFT])

    @left.setter
    def left(self, step: int) -> None:
        self._page[_LEFT] = step

    def announce(self) -> None:
        """Called by rank 0, on any thread: all ranks leave at the next point that no rank has passed."""
        self._page[_ANNOUNCED] = 1
        time.sleep(_SEEN_S)
        self._page[_POINT] = 1 + self._page[_RANKS : _RANKS + self._world_size].max()

    def passes(self, point: int) -> bool:
        """Whether this rank continues at this point; False: it leaves here, like all others."""
        page = self._page
        page[_RANKS + self._rank] = point
        if not page[_ANNOUNCED]:
            return True
        while not page[_POINT]:
            time.sleep(_SEEN_S / 10)
        return point < page[_POINT]
