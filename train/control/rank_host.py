"""Supervises one rank: holds its device, has it forked, forwards calls and events. Torch-free; body of a Ray actor.

If its caller dies, another one may take over: it keeps events until a caller has acknowledged them, and those that
report the rank's state (`STATES`) for the rank's life, so that a new caller can read from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from pathlib import Path
from typing import Any

from runtime.devices.kinds import kind_of
from runtime.errors import ChildDied
from runtime.processes.child import Child
from runtime.processes.kernel import DiesAs, group_dies_as, life

log = logging.getLogger(__name__)

ENTRY = "train.trainer.worker:main"
STATES = ("ready", "done", "fatal", "ended")
NOWHERE = {"job_id": "", "rank": 0, "world_size": 0}
WORLDS = "worlds"  # alongside the warm parent's socket, in a directory of the box's user alone


class RankHost:
    """One rank at a time, forked from the warm parent at `warm_socket`, logging into `log_dir`. `numa_node`: that of
    the device, on which ranks run; None: anywhere.
    """

    def __init__(self, warm_socket: str, log_dir: str, numa_node: int | None = None):
        self._warm_socket, self._log_dir, self._numa_node = warm_socket, Path(log_dir), numa_node
        # Ranks of a world find each other by a file there: torch's default, a port, accepts connections from anyone.
        self._worlds = Path(warm_socket).with_name(WORLDS)
        self._meeting: Path | None = None
        self._child: Child | None = None
        self._place: dict[str, Any] = dict(NOWHERE)
        self._events = _Events()

    async def start(
        self,
        spec: dict[str, Any],
        rank: int,
        world_size: int,
        meeting: str,
        device: str,
        snapshot: str | None = None,
    ) -> None:
        """Fork the rank and return as soon as the process exists; it joins the world by itself. Raises WarmParentError.

        device: its address (DeviceKind.address). meeting: the name of this world and of no other; its ranks are all on
        this node.
        """
        await self.kill()
        self._place = {"job_id": spec["job_id"], "rank": rank, "world_size": world_size}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._meeting = self._worlds / meeting
        self._worlds.mkdir(mode=0o700, exist_ok=True)
        env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        # A world is on one node. By default collectives use an address that other machines can reach.
        env["GLOO_SOCKET_IFNAME"] = "lo"
        kind = kind_of(spec["device_kind"])
        # Set after the fork: the parent never touched a device.
        env |= kind.visibility([device])
        arguments = {"spec": spec, "rank": rank, "world_size": world_size, "snapshot": snapshot}
        self._child = await Child.spawn(
            self._warm_socket,
            ENTRY,
            {**arguments, "meeting": str(self._meeting)},
            env=env,
            numa_nodes=[self._numa_node],
            name=f"{spec['job_id']} rank {rank}",
            log_path=self._log_dir / f"{spec['job_id']}-rank{rank}.log",
        )
        group_dies_as(DiesAs.RANK, self._child.pid)
        self._events = _Events(self._child)

    async def life(self) -> dict[str, Any]:
        """The life of this supervisor, see runtime.processes.kernel.life; also asked to see whether it lives."""
        return life()

    async def status(self) -> dict[str, Any]:
        """`{"job_id", "rank", "world_size"}` of the rank started last, dead or alive. The job is "" before the first
        rank, and again once `kill` has cleared the device."""
        return self._place

    async def call(self, method: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Call the rank; raises ChildDied, ChildError, ChildTimeout."""
        return await self._started().call(method, timeout_s=timeout_s, **args)

    async def next_event(self, after: int = 0) -> dict[str, Any]:
        """The rank's first event with a "number" above `after`, which acknowledges all up to there; the last is "ended"
        (starved: the host's memory ran out; how). The call may be repeated, as after a lost answer."""
        self._started()
        return await self._events.next(after)

    async def kill(self) -> None:
        """Kill the rank if there is one and return when its device is free.

        On a fully loaded machine the kernel takes longer than the wait to free its memory. Giving up then left a
        finished job running for ever.
        """
        # Belongs to this life: the next one may begin while this call still waits.
        child, meeting, place = self._child, self._meeting, self._place
        while child is not None:
            try:
                await child.kill_and_wait()
                break
            except TimeoutError:
                log.warning("%s (pid %d) was killed but has not ended yet; still waiting", child.name, child.pid)
        if meeting is not None:
            meeting.unlink(missing_ok=True)
        if self._place is place:
            self._place = dict(NOWHERE)

    def _started(self) -> Child:
        if self._child is None:
            raise ChildDied("rank", 0, str(self._log_dir), "it was never started")
        return self._child


class _Events:
    """The numbered events of one rank."""

    def __init__(self, child: Child | None = None):
        self._kept: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(child), name=f"events of {child.name}") if child else None

    async def next(self, after: int) -> dict[str, Any]:
        async with self._news:
            while True:
                self._kept = [event for event in self._kept if event["number"] > after or event["event"] in STATES]
                for event in self._kept:
                    if event["number"] > after:
                        return dict(event)
                await self._news.wait()

    async def _read(self, child: Child) -> None:
        for number in count(1):
            event = await child.next_event()
            async with self._news:
                ended = {"event": "ended", "starved": child.starved, "how": child.how_it_ended()}
                self._kept.append({**(event or ended), "number": number})
                self._news.notify_all()
            if event is None:
                return
