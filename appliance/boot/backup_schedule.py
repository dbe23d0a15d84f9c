"""Takes a backup of a running box whenever the newest one is older than the configuration allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from appliance import last_backup
from appliance.boot.scheduled_process import see_through

LOOK_EVERY_S = 60.0


class BackupSchedule:
    """start: starts the process that takes one and writes to `log_path`. newest: the file that tells of the last."""

    def __init__(
        self,
        every_hours: float,
        newest: Path,
        log_path: Path,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        clock: Callable[[], float] = time.time,
    ):
        self._every_s, self._newest, self._log_path = every_hours * 3600, newest, log_path
        self._start, self._clock = start, clock

    async def look(self) -> None:
        """Takes one if it is time. Raises ProcessFailed; whoever calls again tries again."""
        last = last_backup.read(self._newest)
        # One of a time when the clock was ahead says nothing: there would be none until the clock is there again.
        if last is not None and 0 <= self._clock() - last.made_s < self._every_s:
            return
        await see_through(self._start, self._log_path)
