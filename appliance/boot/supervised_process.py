"""Child processes of the box's main process: started, watched, restarted, ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from runtime.background_tasks import first_words
from runtime.processes.kernel import kill_group

BOX_VARIABLE = "APPLIANCE_BOX"  # every process of a box inherits it, with the box's id
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.2, 10.0, 60.0
HOPELESS_S = 600.0
"""One more start does not help a process that has not run steadily for this long: the box ends with an error, and
systemd starts all of it again."""


class Supervised:
    """One process that must run: it is started again, with growing pauses, when it ends or could not be started.

    on_change: told in words when it ends. on_hopeless: told when it has not run steadily for `HOPELESS_S`.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        on_change: Callable[[str], None],
        on_hopeless: Callable[[str], None] = lambda why: None,
    ):
        self.name = name
        self._start, self._on_change, self._on_hopeless = start, on_change, on_hopeless
        self._trouble: dict[str, Any] | None = None
        self._trouble_since_s = 0.0  # monotonic: a clock that is set forward by an hour makes nothing hopeless
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task | None = None
        self._started_s = 0.0
        self._runs = asyncio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def begin(self) -> None:
        """Start it; raises what the first start raises."""
        self._started_s = time.monotonic()
        self._process = await self._start()
        self._runs.set()
        self._supervision = asyncio.create_task(self._keep(), name=f"supervision of {self.name}")

    async def end(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL of its process group after `timeout_s` seconds. True if it ended by itself with 0."""
        if self._supervision is not None:
            self._supervision.cancel()
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

    async def running(self) -> None:
        """Returns once it was started and is not known to have ended."""
        await self._runs.wait()

    def restart(self) -> None:
        """Kill it; its supervisor starts it again."""
        if self._process is not None:
            kill_group(self._process.pid)

    @property
    def trouble(self) -> dict[str, Any] | None:
        """`{"name", "since_s", "why", "failures", "next_try_s"}` since it last ran steadily; None while it does."""
        if self._trouble is not None and self.pid is not None and time.monotonic() - self._started_s > _STEADY_S:
            self._trouble = None
        return self._trouble

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            what = await self._ended()
            self._runs.clear()
            if time.monotonic() - self._started_s > _STEADY_S:
                pause_s, self._trouble = _FIRST_PAUSE_S, None
            while True:
                self._note(what, pause_s)
                self._on_change(f"{what}; starting it again in {pause_s:.1f} s")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                self.restarts += 1
                self._started_s = time.monotonic()
                try:
                    self._process = await self._start()
                    self._runs.set()
                    break
                except Exception as error:  # noqa: BLE001 - reported and tried again: nobody else would start it
                    what = f"{self.name} could not be started ({first_words(error)})"

    async def _ended(self) -> str:
        assert self._process is not None
        code = await self._process.wait()
        kill_group(self._process.pid)
        return f"{self.name} ended with {code}"

    def _note(self, why: str, pause_s: float) -> None:
        now_s, steady_s = time.time(), time.monotonic()
        if self._trouble is None:
            self._trouble_since_s = steady_s
        first = self._trouble or {"name": self.name, "since_s": now_s, "failures": 0}
        self._trouble = {**first, "why": why, "failures": first["failures"] + 1, "next_try_s": now_s + pause_s}
        if (lasts_s := steady_s - self._trouble_since_s) >= HOPELESS_S:
            minutes = lasts_s / 60
            self._on_hopeless(f"{why}; it has not run steadily for {minutes:.0f} minutes")


def kill_leftovers(box_id: str) -> list[int]:
    """SIGKILL processes of an earlier run of this box that outlived it; returns their pids.

    They are known by BOX_VARIABLE. This process and its ancestors are spared.
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


def own_files_only() -> None:
    """Makes whatever this process and those below it create the owner's alone, logs and locks too; some libraries make
    their files open to all."""
    os.umask(0o077)
