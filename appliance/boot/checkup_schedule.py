"""Lets the doctor look at the machine and the box soon after each start, and then once a day."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from appliance.boot.scheduled_process import see_through

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
EVERY_S = 24 * 3600.0


class CheckupSchedule:
    """start: starts the process that looks, which writes what it found into `newest` and else says why into
    `log_path`."""

    def __init__(
        self,
        newest: Path,
        log_path: Path,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._newest, self._log_path, self._start, self._clock = newest, log_path, start, clock
        self._last_s: float | None = None

    async def look(self) -> None:
        """Starts the doctor if it is time, and logs what is wrong that was not before. Raises ProcessFailed; whoever
        calls again tries again."""
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < EVERY_S:
            return
        before = {finding["check"] for finding in read_findings(self._newest)}
        await see_through(self._start, self._log_path)
        self._last_s = now_s
        for finding in read_findings(self._newest):
            if finding["check"] not in before:
                log.warning("the doctor on %(check)s: found %(found)s, wanted %(wanted)s; %(remedy)s", finding)


def looked_at_s(path: Path) -> float | None:
    """When the doctor looked last, Unix time; None if it has not looked yet, or nobody can read what it wrote."""
    try:
        return float(json.loads(path.read_text())["at_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_findings(path: Path) -> list[dict[str, Any]]:
    """What was wrong at the last look: each {"check", "state" ("warn" or "fail"), "found", "wanted", "remedy"}."""
    try:
        found = json.loads(path.read_text())["data"]
        return [finding for finding in found if finding["state"] in ("warn", "fail")]
    except (OSError, ValueError, KeyError, TypeError):
        return []
