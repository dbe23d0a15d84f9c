"""Keeps the logs of a box or a node short, in the process that starts all the others."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from appliance.config import ObservabilitySettings
from runtime.log_rotation import LogLimits, LogRotation

log = logging.getLogger("appliance.boot.main")

_EVERY_S = 5.0


async def keep_logs_short(folder: Path, settings: ObservabilitySettings) -> None:
    """Rotates logs again and again until it is cancelled."""
    limits = LogLimits(settings.log_bytes, settings.log_keep, settings.log_days, settings.logs_total_bytes)
    rotation = LogRotation(folder, limits)
    while True:
        try:
            await asyncio.to_thread(rotation.tend, time.time())
        except OSError as error:
            log.warning("the logs in %s cannot be rotated: %s", folder, error)
        await asyncio.sleep(_EVERY_S)
