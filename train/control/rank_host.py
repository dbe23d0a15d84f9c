"""Supervises one rank: holds its device, has it forked, forwards calls and events. Torch-free; body of a Ray actor.

If its caller dies, another one may take over: it keeps events until a caller has acknowledged them, and those that
report the rank's state (`STATES`) for the rank's life, so that a new caller can read from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Any

from runtime.devices.kinds import kind_of
from runtime.errors import ChildDied
from runtime.processes.child import Child
from runtime.processes.kernel import life
from runtime.processes.oom import DiesAs, group_dies_as

log = logging.getLogger(__name__)

ENTRY = "train.run.worker:main"
COLLECTIVE_TIMEOUT_S = 600.0
STATES = ("ready", "done", "fatal")
NOWHERE = {"job_id": "", "rank": 0, "world_size": 0}
WORLDS = "worlds"  # beside the warm parent's socket, in a directory of the box's user alone
PARK_LIMIT_S = 3600.0  # a parked rank holds no weights, but some 200 MB all the same


class RankHost:
    """One rank at a time, forked from the warm parent at `warm_socket`, logging into `log_dir`. `numa_node`: that of
    the device, on which ranks run; None: anywhere.

    A suspended rank may stay parked (see train.state.parking): it holds no device and belongs to no group until
    `resume` adds it to one again, another rank starts here, or `park_limit_s` has passed.
    """

    def __init__(
        self, warm_socket: str, log_dir: str, numa_node: int | None = None, park_limit_s: float = PARK_LIMIT_S
    ):
        self._warm_socket, self._log_dir, self._park_limit_s = warm_socket, Path(log_dir), park_limit_s
        self._numa_node = numa_node
        # Ranks of a world find each other by a file there: torch's default, a port, accepts connections from anyone.
        self._worlds = Path(warm_socket).with_name(WORLDS)
        self._meeting: Path | None = None
        self._child: Child | None = None
        self._place: dict[str, Any] = dict(NOWHERE)
        self._started_as: dict[str, Any] = {}
        self._events = _Events()
        self._ending: set[asyncio.Task[None]] = set()

    async def start(
        self,
        spec: dict[str, Any],
        rank: int,
        world_size: int,
        meeting: str,
        device: str,
        snapshot: str | None = None,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Fork the rank; it joins the world by itself. `device`: its address (DeviceKind.address).
        `meeting` is the name of this world and of no other; its ranks are all on this node.

        Raises WarmParentError. Returns {"pid"} as soon as the process exists.
        """
        if self._parked():
            self._end_later(self._child, self._meeting)  # it holds no resource that the new rank needs
        else:
            await self.kill()
        self._place = {"job_id": spec["job_id"], "rank": rank, "world_size": world_size}
        self._started_as = {**self._place, "meeting": meeting, "device": device, "spec": spec}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._meeting = self._worlds / meeting
        self._worlds.mkdir(mode=0o700, exist_ok=True)
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            # A world is on one node. By default collectives use an address that other machines can reach.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        kind = kind_of(spec["device_kind"])
        # Set after the fork: the parent never touched a device.
        env |= kind.visibility([device]) | kind.collectives_environment("lo")
        self._child = await Child.spawn(
            self._warm_socket,
            ENTRY,
            {
                "spec": spec,
                "rank": rank,
                "world_size": world_size,
                "snapshot": snapshot,
                "meeting": str(self._meeting),
                "collective_timeout_s": collective_timeout_s,
            },
            env=env,
            numa_nodes=[self._numa_node],
            name=f"{spec['job_id']} rank {rank}",
            log_path=self._log_dir / f"{spec['job_id']}-rank{rank}.log",
        )
        group_dies_as(DiesAs.RANK, self._child.pid)
        self._events = _Events(self._child)
        return {"pid": self._child.pid}

    async def life(self) -> dict[str, Any]:
        """The life of this supervisor, see runtime.processes.kernel.life; also asked to see whether it lives."""
        return life()

    async def parked(self) -> dict[str, Any] | None:
        """Start parameters of the rank parked here: `{"job_id", "rank", "world_size", "meeting" (of its world),
        "device", "spec"}`; None if there is none."""
        return self._started_as if self._parked() else None

    async def resume(self, snapshot: str) -> dict[str, Any]:
        """Resume the parked rank from `snapshot`, as all ranks of its world must. Raises like `call`."""
        if not self._parked():
            raise ChildDied("parked rank", 0, str(self._log_dir), "there is none")
        await self._events.forget()
        await self._child.call("resume", snapshot=snapshot)
        return {"pid": self._child.pid}

    async def status(self) -> dict[str, Any]:
        """`{"alive", "done", "job_id", "rank", "world_size", "pid", "parked"}` of the rank started last; `done`: it
        came to its end. The job is "" before the first rank, again once `kill` has cleared the device, and while its
        rank is parked: then `parked` names it."""
        if self._parked():
            return {**NOWHERE, "alive": False, "done": True, "pid": self._child.pid, "parked": self._place["job_id"]}
        alive = self._child is not None and self._child.alive
        pid = self._child.pid if alive else None
        return {**self._place, "alive": alive, "done": self._events.done, "pid": pid, "parked": ""}

    async def call(self, method: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Call the rank; raises ChildDied, ChildError, ChildTimeout."""
        return await self._started().call(method, timeout_s=timeout_s, **args)

    async def next_event(self, after: int = 0) -> dict[str, Any] | None:
        """The rank's first event with a "number" above `after`, all up to there being acknowledged by it; None once
        it is dead and all its events are read. Repeating the call is harmless: an answer may have been lost."""
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

    async def wait_dead(self) -> None:
        """Returns when no process of the rank is left."""
        if self._child is not None:
            await asyncio.shield(self._child.closed())
            await self._child.kill_and_wait()

    async def drop_parked(self, job_id: str) -> None:
        """End the rank parked here if it belongs to this job."""
        if self._parked() and self._place["job_id"] == job_id:
            await self.kill()

    async def leave_parked(self) -> None:
        """Start the time limit of a parked rank, whose group has ended."""
        if self._parked():
            task = asyncio.create_task(self._expire(self._child, self._events), name=f"parked {self._child.name}")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _parked(self) -> bool:
        return self._child is not None and self._child.alive and self._events.parked

    async def _expire(self, child: Child, events: _Events) -> None:
        life = events.life
        await asyncio.sleep(self._park_limit_s)
        if child is self._child and events.parked and events.life == life:
            await self.kill()

    def _end_later(self, child: Child, meeting: Path | None) -> None:
        async def end() -> None:
            await child.kill_and_wait()
            if meeting is not None:
                meeting.unlink(missing_ok=True)

        task = asyncio.create_task(end(), name=f"end of {child.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _started(self) -> Child:
        if self._child is None:
            raise ChildDied("rank", 0, str(self._log_dir), "it was never started")
        return self._child


class _Events:
    """The numbered events of one rank, since its fork or its last resume (`life`)."""

    def __init__(self, child: Child | None = None):
        self.done = self.parked = False
        self.life = 0
        self._over = child is None
        self._kept: deque[dict[str, Any]] = deque()
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(child), name=f"events of {child.name}") if child else None

    async def next(self, after: int) -> dict[str, Any] | None:
        async with self._news:
            while True:
                self._kept = deque(e for e in self._kept if e["number"] > after or e["event"] in STATES)
                found = next((event for event in self._kept if event["number"] > after), None)
                if found is not None or self._over:
                    return found
                await self._news.wait()

    async def forget(self) -> None:
        """Later events belong to another life."""
        async with self._news:
            self._kept.clear()
            self.done = self.parked = False
            self.life += 1

    async def _read(self, child: Child) -> None:
        number = 0
        while True:
            event = await child.next_event()
            async with self._news:
                if event is None:
                    self._over = True
                else:
                    number += 1
                    self._kept.append({**event, "number": number})
                    self.done = self.done or event["event"] == "done"
                    self.parked = self.parked or bool(event.get("parked"))
                self._news.notify_all()
            if event is None:
                return
