"""The hardware limit that hand-overs are measured against: measured on this box once, and again on demand."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from typing import Any

from anyio import to_thread

from appliance.store.database import Database
from appliance.store.records import box
from runtime.limits import memcpy_bytes_per_s

log = logging.getLogger(__name__)

LIMITS = "limits"
GPU_TIMEOUT_S = 60.0
NONE: dict[str, Any] = {"memcpy_bytes_per_s": None, "host_to_device_bytes_per_s": None, "measured_s": None}


def read(db: Database) -> dict[str, Any]:
    """`memcpy_bytes_per_s` of host memory, `host_to_device_bytes_per_s` of one GPU (None on a box without), when."""
    return box.get(db, LIMITS, NONE)


async def measure(db: Database, has_gpu: bool) -> dict[str, Any]:
    """Measure and keep. Takes a fraction of a second, on a GPU some seconds, on a thread."""
    found = {**(await to_thread.run_sync(measured, has_gpu)), "measured_s": time.time()}
    box.put(db, LIMITS, found)
    return found


def measured(has_gpu: bool) -> dict[str, Any]:
    """The rates of this machine now."""
    return {
        "memcpy_bytes_per_s": memcpy_bytes_per_s(),
        "host_to_device_bytes_per_s": _host_to_device() if has_gpu else None,
    }


def _host_to_device() -> float | None:
    command = [sys.executable, "-m", "serve.load.host_to_device"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        log.warning("the rate to a GPU was not measured within %.0f s", GPU_TIMEOUT_S)
        return None
    if done.returncode != 0:
        log.warning("the rate to a GPU cannot be measured now: %s", done.stderr.strip().splitlines()[-1:])
        return None
    return json.loads(done.stdout)["host_to_device_bytes_per_s"]
