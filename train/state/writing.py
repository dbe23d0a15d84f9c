"""Writes a snapshot or a version together: rank 0 reserves it, every rank fills its part, rank 0 commits.

Rank 0 commits when every rank has written its part. If a rank dies before that, the draft is never committed.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from train.control.rank_messages import barrier, broadcast_json
from weights.format.errors import StoreError, StoreFull
from weights.format.layout import Layout
from weights.memory.store import WeightStore


@dataclass(frozen=True)
class Written:
    """A committed snapshot or version; `seconds` is how long training stood still for it on this rank."""

    path: str
    bytes: int
    seconds: float


def write_together(
    store: WeightStore,
    layout: Layout,
    reserve: Callable[[], Any],
    fill: Callable[[Any], None],
    meta: dict[str, Any],
) -> Written:
    """Collective: `reserve()` on rank 0, `fill(draft)` on every rank, commit on rank 0.

    Raises StoreFull, on every rank, where the store has no room, and OSError on rank 0 alone where its commit finds
    none (see `is_full`). Every error frees what was written.
    """
    began_s = time.perf_counter()
    draft, target = _reserve_together(store, reserve, layout)
    rank = distributed.get_rank()
    try:
        with torch.no_grad():
            fill(draft)
        barrier()
        if rank > 0:
            path, nbytes = target, draft.layout.nbytes
            draft.close()
        else:
            stored = draft.commit(meta=meta)
            path, nbytes = stored.path, stored.nbytes
    except BaseException:
        if rank == 0:
            draft.abort()
        raise
    return Written(str(path), nbytes, time.perf_counter() - began_s)


def is_full(error: Exception) -> bool:
    """Whether memory was full: a draft's memory is allocated at its reservation, its manifest's is not."""
    return isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def _reserve_together(store: WeightStore, reserve: Callable[[], Any], layout: Layout) -> tuple[Any, str]:
    """Rank 0 calls `reserve()`, all attach to the draft; returns it and its path after the commit. An error on rank 0
    is raised on every rank."""
    outcome, draft = None, None
    if distributed.get_rank() == 0:
        try:
            draft = reserve()
            outcome = {"draft": str(draft.path), "target": str(draft.target)}
        except StoreError as error:
            outcome = {"error": str(error), "full": isinstance(error, StoreFull)}
    outcome = broadcast_json(outcome)
    if "error" in outcome:
        raise (StoreFull if outcome["full"] else StoreError)(outcome["error"])
    return draft or store.attach(outcome["draft"], layout), outcome["target"]
