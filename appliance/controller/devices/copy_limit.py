"""Measures the hardware limit that hand-overs are compared with: once on this box, and again on demand."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from anyio import to_thread

from appliance.store.database import Database
from appliance.store.records import box
from runtime.devices.kinds import kind_of

log = logging.getLogger(__name__)

LIMITS = "limits"
GPU_TIMEOUT_S = 60.0
BUFFER_BYTES = 128 * 1024 * 1024
ROUNDS = 3
MAX_THREADS = 8
NONE: dict[str, Any] = {"memcpy_bytes_per_s": None, "host_to_device_bytes_per_s": None, "measured_s": None}


def read(db: Database) -> dict[str, Any]:
    """`memcpy_bytes_per_s` of host memory, `host_to_device_bytes_per_s` of one GPU (None on a box without), when."""
    return box.get(db, LIMITS, NONE)


async def measure(db: Database, kinds: Collection[str]) -> dict[str, Any]:
    """Measure and store the rates for devices of these kinds, on a thread: a fraction of a second, with a GPU some
    seconds."""
    found = {**(await to_thread.run_sync(measured, kinds)), "measured_s": time.time()}
    box.put(db, LIMITS, found)
    return found


def measured(kinds: Collection[str]) -> dict[str, Any]:
    """The rates of this machine now."""
    linked = next((kind for kind in sorted(kinds) if not kind_of(kind).on_host), None)
    return {
        "memcpy_bytes_per_s": memcpy_bytes_per_s(),
        "host_to_device_bytes_per_s": None if linked is None else _host_to_device(linked),
    }


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


def _host_to_device(kind: str) -> float | None:
    command = [sys.executable, "-P", "-m", "serve.load.host_to_device", kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        log.warning("the rate to a GPU was not measured within %.0f s", GPU_TIMEOUT_S)
        return None
    if done.returncode != 0:
        log.warning("the rate to a GPU cannot be measured now: %s", done.stderr.strip().splitlines()[-1:])
        return None
    return json.loads(done.stdout)["host_to_device_bytes_per_s"]
