"""Allocates room for the next snapshot while training continues.

New pages of shared memory cost several times what copying into them costs, and the first touch of a page by each
process costs again. So rank 0 leaves segments of the right size in the store's pool, and every rank maps them and takes
the faults of its own fragments, long before a suspension reserves them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from weights.format.errors import StoreError
from weights.format.layout import Layout
from weights.memory import segment
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)

STOCK_TIMEOUT_S = 20.0
_LOOK_EVERY_S = 0.05
_BURST_BYTES = 16 * 2**20
_BREATH_S = 0.005


def prefault(store: WeightStore, layout: Layout, ours: Iterable[tuple[str, int, int]], *, stock: bool) -> bool:
    """Whether the next reservation of `layout` finds its pages there and, for the byte ranges `ours` (file, first,
    last), mapped. `stock` on one rank of the node. False where there is no room ahead: then it only takes longer.
    """
    try:
        if stock and not store.stock(layout):
            return False
        until = time.monotonic() + STOCK_TIMEOUT_S
        while not (views := store.stocked(layout)):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_EVERY_S)
        for file, first, last in ours:
            for start in range(first, last, _BURST_BYTES):
                segment.populate(views[file][start : min(start + _BURST_BYTES, last)], write=True)
                time.sleep(_BREATH_S)  # populating takes a processor: let the step go on
    except (StoreError, OSError) as error:  # the segment was taken for something else, or memory is full
        log.warning("could not allocate room ahead of the next snapshot: %s", error)
        return False
    return True
