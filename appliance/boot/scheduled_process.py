"""Sees a process through that the box starts by itself from time to time: the doctor, the trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from runtime.processes.ended import how_it_ended
from runtime.processes.kernel import tail


class ProcessFailed(RuntimeError):
    """The process said why."""


async def see_through(start: Callable[[], Awaitable[asyncio.subprocess.Process]], log_path: Path) -> None:
    """Returns when the process ended well, and ends it when this is cancelled. Raises ProcessFailed with the last line
    of its log."""
    process = await start()
    try:
        if await process.wait() != 0:
            lines = tail(log_path).splitlines() or [f"its process {how_it_ended(process.returncode or 0)}"]
            raise ProcessFailed(lines[-1])
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
