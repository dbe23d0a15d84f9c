"""Child processes of the box's main process: started, watched, restarted, ended in order."""

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

BOX_VARIABLE = "APPLIANCE_BOX"  # every process of a box inherits it, with the box's id
_PAUSES_S = (0.2, 10.0)
LOOK_EVERY_S, PATIENCE_S = 5.0, 10.0
HUNG_S = 120.0
"""Longer than any pause that a process recovers from by itself, such as half a minute of SIGSTOP or of swapping."""


class Probe(NamedTuple):
    """Where a process answers. socket_path: of a Unix socket; None: `base_url` has host and port."""

    base_url: str
    path: str
    socket_path: str | None = None

    async def ask(self) -> httpx.Response:
        """Raises httpx.HTTPError."""
        # No verification: we ask our own process, whose certificate names the box and not loopback.
        transport = httpx.AsyncHTTPTransport(uds=self.socket_path, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url=self.base_url, timeout=PATIENCE_S) as client:
            return await client.get(self.path)


class ProcessEnded(RuntimeError):
    """The message says which process, and how it ended."""


class Supervised:
    """One process that must run: `background` starts it again when it ends or could not be started.

    say: gets a message when it ends or hangs. probe: how `look` finds out that it hangs.
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
        self.runs = asyncio.Event()  # it was started and is not known to have ended
        self._answered: tuple[int | None, float] = (None, 0.0)
        self.failures = 0  # restarts without a steady run in between; a slow start that fails is none

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def begin(self) -> None:
        """Start it; raises what the first start raises."""
        self._process = await self._start()
        self.runs.set()
        self._background.keep(self.name, self._watched, _PAUSES_S)

    async def end(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL of its process group after `timeout_s` seconds. True if it ended by itself with 0. Call
        it once the background is stopped."""
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
        """Kill it; the background starts it again."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def look(self) -> None:
        """Ask once; any answer will do, even a refusal. Kill a process that has not answered for `HUNG_S`, or not
        since its start that long ago."""
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
                self._say(f"the {self.name} lives and has not answered for {HUNG_S:.0f} s: it is restarted")
                self.restart()

    async def _watched(self) -> None:
        """Start it unless it runs, and wait for its end. Raises ProcessEnded."""
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
    """SIGKILL processes of an earlier run of this box, known by BOX_VARIABLE, and remove its shared memory and sockets;
    return the pids. This process and its ancestors are spared."""
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
    """Raises BlockingIOError where another box or node runs on this data directory."""
    with open(paths.lock_file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
