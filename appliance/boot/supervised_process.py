"""Starts, watches, restarts and stops the child processes of the box's main process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import psutil

from appliance.paths import BoxPaths
from runtime.background_tasks import STEADY_S, BackgroundTasks
from runtime.processes.kernel import kill_group
from serve.core.spec import remove_segments_below

BOX_VARIABLE = "APPLIANCE_BOX"  # its value is the box's id; every process of a box inherits it
_PAUSES_S = (0.2, 10.0)
LOOK_EVERY_S, PATIENCE_S = 5.0, 10.0
HUNG_S = 120.0
"""Longer than any pause from which a process recovers by itself, such as half a minute of SIGSTOP or swapping."""


class Probe(NamedTuple):
    """A request that shows whether a process answers. socket_path: its Unix socket; None: connect to `base_url`."""

    base_url: str
    path: str
    socket_path: str | None = None

    async def ask(self) -> httpx.Response:
        """Send the request. Raises httpx.HTTPError."""
        # No verification: this is our own process, and its certificate is for the box's name, not for loopback.
        transport = httpx.AsyncHTTPTransport(uds=self.socket_path, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url=self.base_url, timeout=PATIENCE_S) as client:
            return await client.get(self.path)


class ProcessEnded(RuntimeError):
    """A process ended; the message names the process and how it ended."""


class Supervised:
    """A process that must run: `background` restarts it when it ends or fails to start.

    say: called with a message when the process ends or hangs. probe: `look` uses it to detect a hanging process.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        background: BackgroundTasks,
        say: Callable[[str], None],
        probe: Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name, self.probe = name, probe
        self._start, self._background, self._say, self._clock = start, background, say, clock
        self._process: asyncio.subprocess.Process | None = None
        self.runs = asyncio.Event()  # set from the process's start until its end is noticed
        self._answered: tuple[int | None, float] = (None, 0.0)
        self.failures = 0  # restarts in a row, without a run of STEADY_S between them

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def begin(self) -> None:
        """Start the process for the first time. Raises the errors of `start`."""
        self._process = await self._start()
        self.runs.set()
        self._background.keep(self.name, self._watched, _PAUSES_S)

    async def end(self, timeout_s: float) -> bool:
        """Send SIGTERM, and SIGKILL to its process group after `timeout_s` seconds; True if it exited with 0. Callers
        must stop the background first."""
        process = self._process
        if process is None:
            return True
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                self._say(f"{self.name} did not end within {timeout_s:.0f} s: killed")
        kill_group(process.pid)
        return await process.wait() == 0

    def restart(self) -> None:
        """Kill the process, which the background then restarts."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def look(self) -> None:
        """Probe the process once; any answer counts. Kill it if it has not answered for `HUNG_S`, counted from its
        start if it never answered."""
        assert self.probe is not None
        pid, now_s = self.pid, self._clock()
        if pid is None or pid != self._answered[0]:
            self._answered = pid, now_s
            return
        try:
            await self.probe.ask()
            self._answered = pid, now_s
        except httpx.HTTPError:
            if self._clock() - self._answered[1] >= HUNG_S and self.pid == pid:
                self._say(f"the {self.name} runs but has not answered for {HUNG_S:.0f} s: restarting it")
                self.restart()

    async def _watched(self) -> None:
        """Start the process unless it runs, and wait until it ends. Raises ProcessEnded."""
        if not self.runs.is_set():
            self.failures += 1
            self._process = await self._start()
            self.runs.set()
        assert self._process is not None
        started_s = self._clock()
        code = await self._process.wait()
        self.runs.clear()
        if self._clock() - started_s >= STEADY_S:
            self.failures = 0
        kill_group(self._process.pid)
        self._say(f"{self.name} ended with {code}")
        raise ProcessEnded(f"{self.name} ended with {code}")


def clear_leftovers(paths: BoxPaths) -> list[int]:
    """Kill processes of an earlier run of this box, found by BOX_VARIABLE, and remove its shared memory and sockets;
    return the killed pids. Never kills this process or its ancestors."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    killed = []
    for process in psutil.process_iter():
        try:
            if process.pid not in spared and process.environ().get(BOX_VARIABLE) == paths.box_id:
                process.send_signal(signal.SIGKILL)
                killed.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    psutil.wait_procs(killed, timeout=10)
    remove_segments_below(paths.replica_sockets)
    shutil.rmtree(paths.worlds, ignore_errors=True)
    return [process.pid for process in killed]


@contextmanager
def locked(paths: BoxPaths) -> Iterator[None]:
    """Lock the data directory. Raises BlockingIOError if another box or node runs on it."""
    with open(paths.lock_file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
