"""Starts the warm parents of one node and restarts those that die."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runtime.background_tasks import BackgroundTasks
from runtime.errors import WarmParentError
from runtime.logs import tail
from runtime.processes.ended import how_it_ended

# glibc reads these when a warm parent starts.
# hugetlb: ranks allocate and free hundreds of MB in every step, engines when they wake. With huge pages the faults on
# that memory cost a fifth, and a killed process ends sooner. arena_max: with several arenas, the thread that loads the
# next version in place could not reuse memory freed by a staging thread. It faulted in each page again, which was half
# of the pause. x86_non_temporal_threshold: copies of more than 2 MiB bypass the cache, at twice the rate. By default
# glibc does so from three quarters of the cache size that a virtual machine reports, 192 MiB and more.
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.arena_max": 1,
    "glibc.cpu.x86_non_temporal_threshold": 2 * 2**20,
}
POLL_S = 0.05
WARM_ENV = (("GLIBC_TUNABLES", ":".join(f"{name}={value}" for name, value in _TUNABLES.items())),)


@dataclass(frozen=True)
class WarmSpec:
    """One warm parent: `preload` is the module it imports, `socket_path` where it accepts requests."""

    name: str
    preload: str
    socket_path: str
    log_path: str
    env: tuple[tuple[str, str], ...] = WARM_ENV


class NodeAgent:
    """Starts a node's warm parents and restarts each that dies; its forked children survive."""

    def __init__(self, warm: list[WarmSpec]):
        self._specs = {spec.name: spec for spec in warm}
        self._background = BackgroundTasks()
        self._tasks: list[asyncio.Task[None]] = []
        self._pids: dict[str, int] = {}
        # "" once it accepts requests, else how it died before that; absent during an import.
        self._outcomes: dict[str, str] = {}

    async def start(self) -> None:
        """Start all warm parents and return at once. `wait_warm` waits for one."""
        if not self._tasks:
            self._tasks = [
                self._background.keep(f"warm parent: {spec.name}", partial(self._keep, spec))
                for spec in self._specs.values()
            ]

    async def wait_warm(self, name: str, timeout_s: float) -> None:
        """Return when the warm parent `name` accepts requests. Raise WarmParentError after `timeout_s` seconds, or as
        soon as it has ended instead; it is restarted all the same."""
        spec = self._specs[name]
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self._outcomes:
                    await asyncio.sleep(POLL_S)
            how = self._outcomes[name]
        except TimeoutError:
            how = f"has not done so within {timeout_s} s"
        if how:
            log = tail(spec.log_path)
            # In the first line, which is what `status` and hand-overs show of an error.
            last = log.rpartition("\n")[2]
            ends = f"its log {spec.log_path} ends with {last!r}"
            raise WarmParentError(f"warm parent {name} is to import {spec.preload} and {how}; {ends}:\n{log}")

    async def status(self) -> dict:
        return {
            "node_pid": os.getpid(),
            "degraded": self._background.degraded(),
            "warm": {
                name: {"pid": self._pids.get(name), "ready": self._outcomes.get(name) == ""} for name in self._specs
            },
        }

    async def stop(self) -> None:
        """Stop the warm parents; processes forked from them continue until their supervisors stop them."""
        await self._background.stop()

    async def _keep(self, spec: WarmSpec) -> None:
        """One life of a warm parent. Raises WarmParentError at its end."""
        Path(spec.socket_path).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "runtime.processes.warm_parent",
            *("--socket", spec.socket_path, "--preload", spec.preload, "--log", spec.log_path),
            env={**os.environ, **dict(spec.env)},
        )
        self._pids[spec.name] = process.pid
        dead = asyncio.create_task(process.wait())
        try:
            while not dead.done() and not Path(spec.socket_path).exists():
                await asyncio.wait([dead], timeout=POLL_S)
            if not dead.done():
                self._outcomes[spec.name] = ""
            how = how_it_ended(await asyncio.shield(dead))
            if self._outcomes.get(spec.name) != "":
                self._outcomes[spec.name] = how
            raise WarmParentError(f"warm parent {spec.name} {how}; its log is {spec.log_path}")
        except asyncio.CancelledError:
            if process.returncode is None:
                process.terminate()
            await dead
            raise
        finally:
            if self._outcomes.get(spec.name) == "":
                del self._outcomes[spec.name]
