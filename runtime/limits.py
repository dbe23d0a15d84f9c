"""Measures the copy rate of this machine's host memory."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BUFFER_BYTES = 128 * 1024 * 1024
ROUNDS = 3
MAX_THREADS = 8


def memcpy_bytes_per_s(threads: int | None = None, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Return the rate of the fastest of a few warm copies of one buffer into another, in bytes per second.

    threads: how many share the buffer; by default one per core that this process may use, at most MAX_THREADS. The
    buffer is larger than the caches of any CPU core, so that memory is measured.
    """
    threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    source, target = np.ones(buffer_bytes, np.uint8), np.ones(buffer_bytes, np.uint8)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    fastest_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            # numpy does not hold the interpreter's lock while it copies.
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), parts))
            fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return buffer_bytes / fastest_s
