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
from typing import Any, NamedTuple

import httpx
import psutil

from appliance.paths import BoxPaths
from runtime.background_tasks import first_words
from runtime.processes.kernel import kill_group
from serve.core.spec import remove_segments_below

BOX_VARIABLE = "APPLIANCE_BOX"  # every process of a box inherits it, with the box's id
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.2, 10.0, 60.0
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


class Supervised:
    """One process that must run: it is started again, with growing pauses, when it ends or could not be started.

    say: told in words when it ends or hangs. probe: how `look` finds out that it hangs.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        say: Callable[[str], None],
        probe: Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name, self.probe = name, probe
        self._start, self._say, self._clock = start, say, clock
        self._trouble: dict[str, Any] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task | None = None
        self._started_s = 0.0
        self._runs = asyncio.Event()
        self._answered: tuple[int | None, float] = (None, 0.0)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def begin(self) -> None:
        """Start it; raises what the first start raises."""
        self._started_s = self._clock()
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
                self._say(f"{self.name} did not end within {timeout_s:.0f} s: killed")
        kill_group(process.pid)
        return await process.wait() == 0

    async def running(self) -> None:
        """Returns once it was started and is not known to have ended."""
        await self._runs.wait()

    def restart(self) -> None:
        """Kill it; its supervisor starts it again."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def look(self) -> None:
        """Asks once; any answer will do, even a refusal. Kills a process that has not answered for `HUNG_S`, or not
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

    @property
    def trouble(self) -> dict[str, Any] | None:
        """`{"name", "since_s", "why", "failures", "next_try_s"}` since it last ran steadily; None while it does."""
        if self._trouble is not None and self.pid is not None and self._clock() - self._started_s > _STEADY_S:
            self._trouble = None
        return self._trouble

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            what = await self._ended()
            self._runs.clear()
            if self._clock() - self._started_s > _STEADY_S:
                pause_s, self._trouble = _FIRST_PAUSE_S, None
            while True:
                first = self._trouble or {"name": self.name, "since_s": time.time(), "failures": 0}
                again = {"failures": first["failures"] + 1, "next_try_s": time.time() + pause_s}
                self._trouble = {**first, "why": what, **again}
                self._say(f"{what}; starting it again in {pause_s:.1f} s")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                self.restarts += 1
                self._started_s = self._clock()
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


@contextmanager
def locked(paths: BoxPaths) -> Iterator[None]:
    """Raises BlockingIOError where another box or node runs on this data directory."""
    with open(paths.lock_file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def clear_leftovers(paths: BoxPaths) -> list[int]:
    """Ends what an earlier run left, and removes its shared memory and sockets; returns the pids."""
    found = kill_leftovers(paths.box_id)
    remove_segments_below(paths.replica_sockets)
    shutil.rmtree(paths.worlds, ignore_errors=True)
    return found


def own_files_only() -> None:
    """Makes whatever this process and those below it create the owner's alone, logs and locks too; some libraries make
    their files open to all."""
    os.umask(0o077)
