"""Supervises one rank: holds its device, has it forked, passes calls and events. Torch-free; body of a Ray actor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from runtime.child import Child
from runtime.errors import ChildDied

ENTRY = "train.worker:main"
COLLECTIVE_TIMEOUT_S = 600.0

# Read by glibc when the warm parent starts. Ranks take and give back hundreds of MB in every step; with huge pages the
# faults on that memory cost a fifth, and a killed rank is gone sooner.
WARM_ENV = (("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),)


class RankHost:
    """One rank at a time, forked from the warm parent at `warm_socket`, logging into `log_dir`."""

    def __init__(self, warm_socket: str, log_dir: str):
        self._warm_socket, self._log_dir = warm_socket, Path(log_dir)
        self._child: Child | None = None
        self._job_id = ""

    async def start(
        self, spec: dict[str, Any], rank: int, world_size: int, master_addr: str, master_port: int, device: str,
        snapshot: str | None = None, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> dict[str, Any]:  # fmt: skip
        """Fork the rank; it joins the world by itself. `device` is "cpu" or the index of a CUDA device.

        Raises WarmParentError. Returns {"pid"} as soon as the process exists.
        """
        await self.kill()
        self._job_id = spec["job_id"]
        self._log_dir.mkdir(parents=True, exist_ok=True)
        env = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_SIZE": "1",
            "MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port),
        }  # fmt: skip
        if master_addr.startswith("127."):
            env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host name, which may not resolve
        if device != "cpu":
            env["CUDA_VISIBLE_DEVICES"] = device  # set after the fork: the parent never touched CUDA
        self._child = await Child.spawn(
            self._warm_socket, ENTRY,
            {"spec": spec, "snapshot": snapshot, "collective_timeout_s": collective_timeout_s},
            env=env, log_path=self._log_dir / f"{spec['job_id']}-rank{rank}.log", name=f"{spec['job_id']} rank {rank}",
        )  # fmt: skip
        return {"pid": self._child.pid}

    async def status(self) -> dict[str, Any]:
        """`{"alive", "job_id", "pid"}` of the rank started last; alive is False before the first."""
        alive = self._child is not None and self._child.alive
        return {"alive": alive, "job_id": self._job_id, "pid": self._child.pid if alive else None}

    async def call(self, method: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the rank something; raises ChildDied, ChildError, ChildTimeout."""
        return await self._started().call(method, timeout_s=timeout_s, **args)

    async def next_event(self) -> dict[str, Any] | None:
        """Next event of the rank; None once it is dead and all its events are read."""
        return await self._started().next_event()

    async def kill(self) -> None:
        """Kill the rank if there is one and return when its device is free."""
        if self._child is not None:
            await self._child.kill_and_wait()

    async def wait_dead(self) -> None:
        """Returns when no process of the rank is left."""
        if self._child is not None:
            await asyncio.shield(self._child.closed())
            await self._child.kill_and_wait()

    def _started(self) -> Child:
        if self._child is None:
            raise ChildDied("rank", 0, str(self._log_dir), "it was never started")
        return self._child
