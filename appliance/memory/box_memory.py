"""The memory of every host of the box: `memory_policy` decides; this module reads, acts and reports.

It frees idle weights itself. Engines and jobs belong to the scheduler's loop, which reads the limits here and is woken
when the limits change. Everything runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.memory import memory_policy
from appliance.memory.memory_policy import Action, Holdings, MemoryState, gb
from appliance.store.database import Database
from appliance.store.rows import AUDIT, AuditRow, JobRow
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import AWAKE, node_of
from scheduler.devices.discovery import HOME_NODE
from scheduler.devices.host_reading import MemoryReading, read_memory
from train.methods.methods import method_of
from weights.memory.store import WeightStore

if TYPE_CHECKING:
    from scheduler.ray.nodes import Nodes

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
WANTED_FOR_S = 3.0
"""A refused engine or job stays wanted until the loop has not requested it for this long."""
STARTING_FOR_S = 15.0
"""For this long after a start is allowed, available memory may not reflect the new engine."""
BARREN_FOR_S = 10.0

Stored = Callable[..., Awaitable[Any]]
"""Calls a method of a node's weight store."""


@dataclass(frozen=True, slots=True)
class Means:
    """The policy's inputs and callbacks. engine_bytes: host memory that one more engine of a model needs. job_bytes:
    host memory that a starting job needs, by number of devices, ascending. devices: returns a node's number of devices.
    nudge: wakes the loop. on_enough: called when memory is no longer short. save: starts copying snapshots to disk."""

    engine_bytes: Callable[[str], int]
    job_bytes: Callable[[JobRow], Mapping[int, int]]
    devices: Callable[[str], int]
    nudge: Callable[[], Any]
    on_enough: Callable[[], None] = lambda: None
    save: Callable[[], None] = lambda: None


class HostMemory:
    """Memory of one node's host. reading: its current state. reserve: bytes to keep available, None for the default."""

    def __init__(
        self,
        db: Database,
        stored: Stored,
        reserve: int | None,
        means: Means,
        reading: MemoryReading,
        clock: Callable[[], float],
        node: str,
    ):
        self._db, self._stored, self._means, self._clock, self._node = db, stored, means, clock, node
        self._reading = reading
        # Default: 1/25 of the total, at least 0.5 GiB, at most 8 GiB.
        self.reserve = min(max(reading.total // 25, 2**29), 8 * 2**30) if reserve is None else reserve
        self._state = MemoryState()
        self._waiting_engines: dict[str, tuple[int, float]] = {}  # model -> bytes, time of the last request
        self._waiting_jobs: dict[str, tuple[int, float]] = {}
        self._starting: list[tuple[float, int]] = []
        self._barren_until_s = 0.0  # no attempt to free idle weights before this time
        self._replicas: list[dict[str, Any]] = []

    # Called by the loop

    def lacks(self, row: JobRow) -> str:
        """Return why this job gets no memory here now, as a sentence; "" if it can start or already runs here."""
        have = f"Memory is short ({gb(self._reading.available)} available); it"
        if row.id in self._state.jobs:
            return f"{have} continues by itself when enough is available."
        if row.phase == "running" and (not row.devices or node_of(row.devices[0]) == self._node):
            return ""
        if self._state.short:
            return f"{have} starts by itself when enough is available."
        needed, room = min(self._needs(row).values()), self._room()
        if needed <= room:
            self._waiting_jobs.pop(row.id, None)
            return ""
        return (
            f"Needs about {gb(needed)} of host memory; {gb(max(0, room))} can be allocated now "
            f"({gb(self._reading.available)} available, {gb(self.reserve)} kept in reserve). "
            "It starts by itself when enough is available."
        )

    def sizes(self, row: JobRow) -> dict[int, bool]:
        """Map each number of devices that the job may use here to whether the needed memory is available now; if it is
        for none, all are True. A running job already has its ranks' memory."""
        needs = self._needs(row)
        held = max((size for size in needs if size <= len(row.devices)), default=0)
        room = self._room() + needs.get(held, 0)
        fits = {size: size <= held or needed <= room for size, needed in needs.items()}
        return fits if any(fits.values()) else dict.fromkeys(needs, True)

    def want(self, row: JobRow) -> None:
        """Request that this node free unused memory for a job that found memory on no node."""
        if row.id not in self._state.jobs and not self._state.short:
            self._waiting_jobs[row.id] = (min(self._needs(row).values()), self._clock())

    def max_asleep(self) -> int | None:
        """Return how many sleeping engines may stay as processes; None: the configured number."""
        return self._state.sleepers

    def book_engine(self, model: str) -> bool:
        """Book memory for one more engine of the model, woken or new; False if there is too little. For a model without
        an awake engine the box then frees memory, unless the engine is too large; any other engine just waits."""
        needed, room = self._means.engine_bytes(model), self._room()
        has_one = any(replica["model"] == model and replica["state"] in AWAKE for replica in self._replicas)
        if needed <= room and not (self._state.short and has_one):
            self._waiting_engines.pop(model, None)
            self._starting.append((self._clock(), needed))
            return True
        if not has_one and not self.too_large(model):
            if model not in self._waiting_engines:
                log.warning("an engine of %s waits for memory: %s free, %s needed", model, gb(max(0, room)), gb(needed))
            self._waiting_engines[model] = (needed, self._clock())
        return False

    def too_large(self, model: str) -> str:
        """Return why this host can never have enough memory for an engine of the model, as a sentence; "" if it can."""
        needed = self._means.engine_bytes(model)
        fits = needed <= self._reading.total - self.reserve
        return "" if fits else f"an engine of {model} needs {gb(needed)}, more than {self._reading.where} has"

    def _needs(self, row: JobRow) -> dict[int, int]:
        """Return the bytes that a job needs by number of devices: numbers that this node has, else the smallest."""
        needs = {size: min(needed, self._reading.total // 2) for size, needed in self._means.job_bytes(row).items()}
        most = max(self._means.devices(self._node), min(needs))
        return {size: needed for size, needed in needs.items() if size <= most}

    def _room(self) -> int:
        return self._reading.available - self.reserve - sum(needed for _, needed in self._starting)

    # One pass

    async def look(self, status: Mapping[str, Any], reading: MemoryReading) -> None:
        """Run one pass: decide, and take at most one action. status: the loop's status."""
        self._replicas, now_s, self._reading = status["replicas"], self._clock(), reading
        for requests in (self._waiting_engines, self._waiting_jobs):
            for name in [name for name, (_, at_s) in requests.items() if now_s - at_s >= WANTED_FOR_S]:
                del requests[name]
        self._starting = [(at_s, needed) for at_s, needed in self._starting if now_s - at_s < STARTING_FOR_S]
        wanted = sum(needed for needed, _ in self._waiting_engines.values())
        enough = self._reading.available >= self.reserve * memory_policy.ENOUGH_OF_RESERVE + wanted
        if not enough or self._state.holds_back or self._waiting_jobs:
            await self._decide(status, wanted, now_s)
        if self._waiting_engines:
            self._means.nudge()

    async def _decide(self, status: Mapping[str, Any], wanted: int, now_s: float) -> None:
        was_short = self._state.short
        known = {job["id"] for job in status["jobs"]}
        self._state = replace(self._state, jobs=tuple(job for job in self._state.jobs if job in known))
        holdings = await self._holdings(status, wanted, now_s)
        self._state, action = memory_policy.decide(self._reading, holdings, self._state, now_s, self.reserve)
        if self._state.short and not was_short:
            log.warning("memory is short: %s", self._state.short)
        if was_short and not self._state.short:
            log.info("memory is no longer short: %s available", gb(self._reading.available))
            self._means.on_enough()
        if action is not None:
            await self._carry_out(action, now_s)

    async def _carry_out(self, action: Action, now_s: float) -> None:
        log.warning("%s", action.why)
        if action.kind == "idle":
            if await self._stored("evict", action.nbytes) == 0:
                self._barren_until_s = now_s + BARREN_FOR_S
        else:
            if action.kind == "job":
                self._means.save()
            verb = "memory.taken" if action.back else "memory.given"
            target = action.job or ("box" if self._node == HOME_NODE else self._node)
            detail = {"what": action.kind, "reason": action.why}
            AUDIT.insert(self._db, AuditRow(verb, target, detail=detail, created_s=now_s))
        self._means.nudge()

    async def _holdings(self, status: Mapping[str, Any], wanted: int, now_s: float) -> Holdings:
        """Return the memory that could be freed and the demand; only the demand if memory is clearly enough."""
        job_wanted = next((needed for needed, _ in self._waiting_jobs.values()), 0)
        if self._reading.available >= self.reserve * memory_policy.ENOUGH_OF_RESERVE + max(wanted, job_wanted):
            return Holdings(wanted=wanted)
        return Holdings(
            idle=0 if now_s < self._barren_until_s else await self._stored("idle_bytes"),
            sleepers=sum(replica["state"] == "asleep" and self._has(replica) for replica in status["replicas"]),
            running=tuple(job["id"] for job in reversed(status["jobs"]) if self._has(job)),  # the last job yields first
            wanted=wanted,
            job_wanted=job_wanted,
        )

    def _has(self, holder: Mapping[str, Any]) -> bool:
        """Whether this job or replica runs on this node. Jobs and engines never span nodes."""
        return bool(holder["devices"]) and node_of(holder["devices"][0]) == self._node

    # Reports for users

    def status(self) -> dict[str, Any]:
        """Return this host's memory for `/admin/v1/status`, in bytes."""
        return {
            "available_bytes": self._reading.available,
            "total_bytes": self._reading.total,
            "where": self._reading.where,
            "reserve_bytes": self.reserve,
            "short": self._state.short,
        }

    def notes(self) -> list[str]:
        """Return a sentence for users if memory is short, or jobs or engines wait for it."""
        if not self._state.holds_back and not self._waiting_engines:
            return []
        of, verb = "" if self._node == HOME_NODE else f" of {self._node}", "is" if self._state.short else "was"
        parts = [f"memory{of} {verb} short: {gb(self._reading.available)} available"]
        if self._state.jobs:
            parts.append("training waits")
        if self._waiting_engines:
            parts.append(f"{', '.join(sorted(self._waiting_engines))} waits for an engine")
        return ["; ".join(parts)]


class BoxMemory:
    """Manages memory of the box's own host and of joined nodes. A job may start on a node with memory for it; an engine
    waits for memory on its node. A node without a memory report refuses nothing. Call `look` every `LOOK_EVERY_S`.

    reserve: bytes to keep available on each host; None: each host's default.
    """

    def __init__(
        self,
        db: Database,
        store: WeightStore,
        nodes: Nodes,
        reserve: int | None,
        means: Means,
        read: Callable[[], MemoryReading] = read_memory,
        clock: Callable[[], float] = time.time,
    ):
        self._db, self._store, self._nodes, self._reserve = db, store, nodes, reserve
        self._means, self._read, self._clock = means, read, clock
        self._hosts = {HOME_NODE: self._host(HOME_NODE, read())}

    def job_nodes(self, row: JobRow) -> tuple[str, ...]:
        """Return nodes on which this job can run; only nodes with memory for it, if there are any, so that a job leaves
        a node that is short of memory. Jobs with rollouts run only on the box's own host."""
        alike = self._nodes.alike()
        if method_of(row.method).rolls_out:
            return (HOME_NODE,)
        return tuple(name for name in alike if not self._lacks(name, row)) or alike

    def job_sizes(self, row: JobRow) -> tuple[int, ...]:
        """Return numbers of devices for which each suitable node with so many devices has memory for the job now. A
        node without a memory report allows any number."""
        nodes = self.job_nodes(row)
        each = [self._hosts[name].sizes(row) for name in nodes if name in self._hosts]
        sizes = set().union(*each) if self._hosts.keys() >= set(nodes) else self._means.job_bytes(row).keys()
        return tuple(size for size in sorted(sizes) if all(fits.get(size, True) for fits in each))

    def waits_for(self, row: JobRow) -> str:
        """Return why this job gets no memory on any node now, as a sentence; "" if it can start or already runs."""
        alike = self._nodes.alike()
        lacking = [self._lacks(name, row) for name in alike]
        if not all(lacking):
            return ""
        for name in alike:
            self._hosts[name].want(row)
        return lacking[0]

    def _lacks(self, name: str, row: JobRow) -> str:
        return self._hosts[name].lacks(row) if name in self._hosts else ""

    def max_asleep(self) -> dict[str, int]:
        """Return the limit of sleeping engines for each node; other nodes keep the configured number."""
        return {name: bound for name, host in self._hosts.items() if (bound := host.max_asleep()) is not None}

    def book_engine(self, model: str, node: str) -> bool:
        """Book memory on this node for one more engine of the model; False if there is too little."""
        return node not in self._hosts or self._hosts[node].book_engine(model)

    def too_large(self, model: str) -> str:
        """Return why no host of the box can ever hold an engine of the model; "" if one can."""
        why = [self._hosts[name].too_large(model) if name in self._hosts else "" for name in self._nodes.alike()]
        return why[0] if all(why) else ""

    async def look(self, status: Mapping[str, Any]) -> None:
        """Run one pass over each host. status: the loop's status. A lost node affects only its own work."""
        readings = {HOME_NODE: self._read()}
        for name, reading in self._nodes.memory().items():
            where = name if reading.where == "this machine" else f"{reading.where} of {name}"
            readings[name] = replace(reading, where=where)
        self._hosts = {name: self._hosts.get(name) or self._host(name, reading) for name, reading in readings.items()}
        for name, host in self._hosts.items():
            try:
                await host.look(status, readings[name])
            except EffectFailed as error:
                log.warning("cannot free memory on %s: %s", name, error, extra={"node": name})

    def _host(self, name: str, reading: MemoryReading) -> HostMemory:
        def at_home(method: str, *arguments: Any) -> Awaitable[Any]:
            return asyncio.to_thread(getattr(self._store, method), *arguments)

        stored = at_home if name == HOME_NODE else partial(self._nodes.of_store, name)
        return HostMemory(self._db, stored, self._reserve, self._means, reading, self._clock, name)

    def status(self) -> dict[str, Any]:
        """Return the memory of the box's own host, see HostMemory.status."""
        return self._hosts[HOME_NODE].status()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the memory of each joined node, see HostMemory.status."""
        return {name: host.status() for name, host in sorted(self._hosts.items()) if name != HOME_NODE}

    def notes(self) -> list[str]:
        """Return a sentence for users for each host that lacks memory."""
        return [note for host in self._hosts.values() for note in host.notes()]
