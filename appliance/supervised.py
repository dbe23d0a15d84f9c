"""Child processes of the box's main process: started, watched, restarted, ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import psutil

from runtime.process import kill_group

BOX_VARIABLE = "APPLIANCE_BOX"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.2, 10.0, 60.0


class Supervised:
    """One process that must run: started again, with growing pauses, whenever it ends by itself."""

    def __init__(
        self, name: str, start: Callable[[], Awaitable[asyncio.subprocess.Process]], on_change: Callable[[str], None]
    ):
        self.name = name
        self._start, self._on_change = start, on_change
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def begin(self) -> None:
        """Start it; raises what the first start raises."""
        self._process = await self._start()
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of {self.name}")

    async def end(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL of its process group after `timeout_s` seconds. True if it ended by itself with 0."""
        if self._keeper is not None:
            self._keeper.cancel()
        process = self._process
        if process is None:
            return True
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                self._on_change(f"{self.name} did not end within {timeout_s:.0f} s: killed")
        kill_group(process.pid)
        return await process.wait() == 0

    def restart(self) -> None:
        """Kill it; its keeper starts it anew."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            code = await self._process.wait()
            kill_group(self._process.pid)
            if time.monotonic() - started_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self._on_change(f"{self.name} ended with {code}; starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            self.restarts += 1
            self._process = await self._start()


def kill_leftovers(box_id: str) -> list[int]:
    """SIGKILL processes of an earlier run of this box that outlived it; returns their pids.

    Every process of a box inherits APPLIANCE_BOX=<box id>; this process and its ancestors are spared.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in spared and process.environ().get(BOX_VARIABLE) == box_id:
                process.send_signal(signal.SIGKILL)
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    psutil.wait_procs(found, timeout=10)
    return [process.pid for process in found]
