"""Watches and manages the memory of one node's host: `memory_policy` decides, this reads, acts and
reports. `box_memory` has one of these per node.

This module itself frees what can go at once (freed segments, versions that nobody reads, parked ranks). The scheduler
loop controls engines and jobs: it asks here for limits (`lacks`, `bounded`, `max_asleep`, `book_engine`) and
is nudged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from appliance.memory import memory_policy
from appliance.memory.memory_policy import Action, Holdings, MemoryState, gb
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.records import audit
from appliance.store.rows import AuditRow, JobRow
from scheduler.core.inventory import node_of
from scheduler.core.memory_reading import MemoryReading
from scheduler.core.workload import AWAKE, DeploymentView
from scheduler.devices.discovery import HOME_NODE
from scheduler.devices.host_reading import others_bytes, read_memory
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
FEWER_DEVICES_AFTER_S = 30.0
"""How long a job that may run on fewer devices waits for the memory of the largest number: others give memory back for
it meanwhile."""
WANTED_FOR_S = 3.0
"""A refused engine counts as wanted until the loop has not asked for it for this long."""
STARTING_FOR_S = 15.0
"""For this long the available memory may not yet reflect an engine that was allowed to start."""
BARREN_FOR_S = 10.0
OTHERS_EVERY_S = 5.0


class Parked(Protocol):
    """Parked ranks; `scheduler.ray.groups`."""

    async def parked(self, node: str) -> tuple[str, ...]:
        """Jobs with parked ranks on this node."""

    async def drop_parked(self, node: str) -> None:
        """End all parked ranks on this node."""


class Stored(Protocol):
    """What a node's shared memory holds that nobody needs there."""

    async def idle_bytes(self) -> tuple[int, int]:
        """Bytes that the store's pool holds, and those of versions that nobody reads and another tier has."""

    async def trim_pool(self) -> int:
        """Returns the bytes freed."""

    async def evict(self, nbytes: int) -> int:
        """Returns the bytes freed."""

    async def others_bytes(self, reading: MemoryReading) -> int | None:
        """What programs other than the box hold; None if unknown."""


class StoredHere:
    """This machine's."""

    def __init__(self, store: WeightStore):
        self._store = store

    async def idle_bytes(self) -> tuple[int, int]:
        pool_bytes = (await asyncio.to_thread(self._store.usage)).pool_bytes
        return pool_bytes, await asyncio.to_thread(self._store.evictable_bytes)

    async def trim_pool(self) -> int:
        return await asyncio.to_thread(self._store.trim_pool, 0)

    async def evict(self, nbytes: int) -> int:
        return await asyncio.to_thread(self._store.evict, nbytes)

    async def others_bytes(self, reading: MemoryReading) -> int | None:
        # This process's parent is the main process; the whole box runs below it.
        shared = self._store.usage().used_bytes
        return await asyncio.to_thread(others_bytes, os.getppid(), shared, reading)


@dataclass(frozen=True, slots=True)
class Means:
    """The policy's inputs and callbacks. engine_bytes: host memory that another engine of a model takes. job_bytes:
    what a job takes when it starts, by the numbers of devices that it may run on, ascending. devices: how many a node
    has. replicas, jobs: from the loop's status. nudge: wakes the loop. on_enough: called when memory suffices again
    after it was short. save: starts copying snapshots to disk."""

    engine_bytes: Callable[[str], int]
    job_bytes: Callable[[JobRow], Mapping[int, int]]
    devices: Callable[[str], int]
    loop_status: Callable[[], Mapping[str, Any]]
    parked: Parked
    nudge: Callable[[], Any]
    on_enough: Callable[[], None] = lambda: None
    save: Callable[[], None] = lambda: None


class HostMemory:
    """Call `look` every `LOOK_EVERY_S`. Runs entirely on the controller's loop."""

    def __init__(
        self,
        db: Database,
        stored: Stored,
        reserve: int | None,
        means: Means,
        read: Callable[[], MemoryReading] = read_memory,
        clock: Callable[[], float] = time.time,
        node: str = HOME_NODE,
    ):
        self._db, self._stored, self._read, self._clock, self._node = db, stored, read, clock, node
        self._reading = read()
        self.reserve = memory_policy.default_reserve(self._reading.total) if reserve is None else reserve
        self._state = MemoryState()
        self._wanted: dict[str, tuple[int, float]] = {}
        self._too_large: set[str] = set()
        self._starting: deque[tuple[float, int]] = deque()
        self._waiting_jobs: dict[str, tuple[int, float]] = {}
        self._waiting_since: dict[str, tuple[float, float]] = {}
        self._parked: frozenset[str] = frozenset()
        self._barren: dict[str, float] = {}
        self._told: deque[dict[str, Any]] = deque(maxlen=20)
        self._others: int | None = None
        self._others_s = float("-inf")
        self._exhausted = False
        self._means = means

    # --- asked by the loop ----------------------------------------------------------------------------------------

    def lacks(self, row: JobRow) -> str:
        """Why this job cannot have memory here now, in a sentence; "" when it can, or already has it."""
        if row.id in self._state.jobs:
            return f"Memory is short{self._why()}; it continues by itself when there is enough."
        if row.phase == "running" and (not row.devices or node_of(row.devices[0]) == self._node):
            return ""
        if self._state.short:
            return f"Memory is short{self._why()}; it starts by itself when there is enough."
        needs = self._needs(row)
        needed = needs[max(needs)]
        # Parked ranks have their memory; without this, a job waited for as much again while its own ranks held it.
        if needed <= self._room() or row.id in self._parked:
            self._waiting_jobs.pop(row.id, None)
            self._waiting_since.pop(row.id, None)
            return ""
        now_s = self._clock()
        since_s = self._waiting_since.get(row.id, (now_s, now_s))[0]
        self._waiting_since[row.id] = since_s, now_s
        fewer = min(needs.values()) <= self._room()
        if fewer and now_s - since_s >= FEWER_DEVICES_AFTER_S:
            return ""
        devices = f" on {max(needs)} devices" if len(needs) > 1 else ""
        return (
            f"Needs about {gb(needed)} of host memory{devices}; {gb(max(0, self._room()))} can be allocated now "
            f"({gb(self._reading.available)} available{self._of_others()}, {gb(self.reserve)} kept in reserve). "
            f"It starts by itself when there is enough{', or on fewer devices within a minute' if fewer else ''}."
        )

    def sizes(self, row: JobRow) -> dict[int, bool]:
        """Of the numbers of devices that the job may run on here, whether there is memory for each now; for all of them
        if the number does not matter. A running job already has its ranks' memory."""
        needs = self._needs(row)
        held = max((size for size in needs if size <= len(row.devices)), default=0)
        room = self._room() + needs.get(held, 0)
        found = {size: size <= held or needed <= room for size, needed in needs.items()}
        parked = row.id in self._parked and not row.devices  # its ranks have their memory
        return found if any(found.values()) and not parked else dict.fromkeys(needs, True)

    def want(self, row: JobRow) -> None:
        """No node has memory for this job: this node gives back for it memory that nobody computes with."""
        if row.id not in self._state.jobs and not self._state.short:
            self._waiting_jobs[row.id] = (max(self._needs(row).values()), self._clock())

    def _needs(self, row: JobRow) -> dict[int, int]:
        """By the numbers of devices that this node has; by the smallest if it has fewer."""
        needs = {size: min(needed, self._reading.total // 2) for size, needed in self._means.job_bytes(row).items()}
        most = max(self._means.devices(self._node), min(needs))
        return {size: needed for size, needed in needs.items() if size <= most}

    def bounded(self, deployments: tuple[DeploymentView, ...]) -> tuple[DeploymentView, ...]:
        """The deployments, limited to as many engines as memory allows; never fewer than one each."""
        if not self._state.engines:
            return deployments
        return tuple(
            deployment
            if (bound := self._state.engines.get(deployment.model)) is None
            else replace(
                deployment,
                min_replicas=min(deployment.min_replicas, bound),
                max_replicas=min(deployment.max_replicas, bound),
            )
            for deployment in deployments
        )

    def max_asleep(self) -> int | None:
        """How many sleeping engines may stay as processes; None: the configured number."""
        return self._state.sleepers

    def book_engine(self, model: str) -> bool:
        """Whether memory allows one more engine of the model, waking or new. For a model without an awake engine the
        box gives up other memory; a further engine waits."""
        needed = self._means.engine_bytes(model)
        if told := self.too_large(model):
            # It would find no room, whatever others gave up for it: one request suspended all jobs for ever.
            if model not in self._too_large:
                log.error(told)
                self._too_large.add(model)
            self._wanted.pop(model, None)
            return False
        self._too_large.discard(model)
        # When nothing else can be freed, half of the reserve may be used: only these requests need it.
        room = self._room() + (self.reserve // 2 if self._exhausted else 0)
        has_one = (needed > room or bool(self._state.short)) and self._awake()[model] > 0
        if needed <= room and not has_one:
            self._wanted.pop(model, None)
            self._starting.append((self._clock(), needed))
            return True
        if not has_one:
            if model not in self._wanted:
                log.warning(
                    "an engine of %s waits for memory of %s: it needs %s, %s can be allocated",
                    model,
                    self._reading.where,
                    gb(needed),
                    gb(max(0, room)),
                    extra={"model": model},
                )
            self._wanted[model] = (needed, self._clock())
        return False

    def too_large(self, model: str) -> str:
        """Why no memory of this host is ever enough for an engine of the model, in a sentence; "" where it may be."""
        needed = self._means.engine_bytes(model)
        fits = needed <= self._reading.total - self.reserve // 2
        return "" if fits else f"an engine of {model} needs {gb(needed)}, more than {self._reading.where} has"

    # --- one pass ---------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Read, decide, and do at most one thing."""
        now_s = self._clock()
        self._reading = self._read()
        self._forget(now_s)
        wanted = sum(needed for needed, _ in self._wanted.values())
        await self._look_at_parked()
        enough = self._reading.available >= self.reserve * memory_policy.ENOUGH_OF_RESERVE + wanted
        if enough and not self._state.holds_back and not self._waiting_jobs:
            self._exhausted = False
            if self._wanted:
                self._means.nudge()
            return
        status = self._means.loop_status()
        self._state = memory_policy.without(
            self._state, jobs={job["id"] for job in status["jobs"]}, models=self._awake(status)
        )
        holdings = await self._holdings(status, wanted)
        await self._look_at_others(now_s)
        was_short = self._state.short
        self._state, action = memory_policy.decide(self._reading, holdings, self._state, now_s, self.reserve)
        self._exhausted = bool(self._state.short) and action is None and now_s >= self._state.next_s
        if self._state.short and not was_short:
            log.warning("memory is short: %s%s", self._state.short, self._of_others())
        if was_short and not self._state.short:
            log.info("memory is no longer short: %s available", gb(self._reading.available))
            self._means.on_enough()
        if action is not None:
            await self._carry_out(action, now_s)
        if self._wanted:
            self._means.nudge()

    async def _carry_out(self, action: Action, now_s: float) -> None:
        log.warning("%s", action.why)
        self._told.append({"at_s": now_s, "what": action.kind, "back": action.back, "why": action.why})
        freed = None
        match action.kind:
            case "pool":
                freed = await self._stored.trim_pool()
            case "versions":
                freed = await self._stored.evict(action.nbytes)
            case "parked":
                await self._means.parked.drop_parked(self._node)
            case "job":
                self._means.save()
        if freed == 0:
            self._barren[action.kind] = now_s + BARREN_FOR_S
        self._means.nudge()
        if freed is None:
            audit.insert(
                self._db,
                AuditRow(
                    new_id("audit_"),
                    None,
                    "memory.taken" if action.back else "memory.given",
                    action.what or ("box" if self._node == HOME_NODE else self._node),
                    "done",
                    "",
                    now_s,
                    {"what": action.kind, "reason": action.why},
                ),
            )

    async def _holdings(self, status: Mapping[str, Any], wanted: int) -> Holdings:
        job_wanted = next((needed for needed, _ in self._waiting_jobs.values()), 0)
        if not self._is_or_may_be_short(max(wanted, job_wanted)):
            return Holdings(wanted=wanted)
        pool, versions = await self._stored.idle_bytes()
        running = [job["id"] for job in status["jobs"] if self._has(job)]
        return Holdings(
            pool=0 if "pool" in self._barren else pool,
            versions=0 if "versions" in self._barren else versions,
            sleepers=sum(replica["state"] == "asleep" and self._has(replica) for replica in status["replicas"]),
            parked=await self._means.parked.parked(self._node),
            running=tuple(reversed(running)),  # in queue order: the last is suspended first
            spare=self._spare(status),
            wanted=wanted,
            job_wanted=job_wanted,
        )

    async def _look_at_parked(self) -> None:
        """Only while a job waits, or ranks of one were seen: whether it is a job whose ranks are already there."""
        if not self._waiting_jobs and not self._parked:
            return
        self._parked = frozenset(await self._means.parked.parked(self._node))
        for job_id in self._parked & self._waiting_jobs.keys():
            del self._waiting_jobs[job_id]
            self._means.nudge()

    def _is_or_may_be_short(self, wanted: int) -> bool:
        return self._reading.available < self.reserve * memory_policy.ENOUGH_OF_RESERVE + wanted

    def _has(self, holder: Mapping[str, Any]) -> bool:
        """Whether this job or replica is here. No job and no engine spans nodes."""
        return bool(holder["devices"]) and node_of(holder["devices"][0]) == self._node

    def _spare(self, status: Mapping[str, Any]) -> dict[str, int]:
        """A model's bound on engines does not say on which node one fewer should run, so only the home node sets it."""
        if self._node != HOME_NODE:
            return {}
        here = {replica["model"] for replica in status["replicas"] if self._has(replica) and replica["state"] in AWAKE}
        return {model: count for model, count in self._awake(status).items() if count > 1 and model in here}

    def _forget(self, now_s: float) -> None:
        self._wanted = _asked_lately(self._wanted, now_s)
        self._waiting_jobs = _asked_lately(self._waiting_jobs, now_s)
        self._waiting_since = {
            job_id: (since_s, asked_s)
            for job_id, (since_s, asked_s) in self._waiting_since.items()
            if now_s - asked_s < FEWER_DEVICES_AFTER_S
        }
        self._barren = {kind: until_s for kind, until_s in self._barren.items() if until_s > now_s}
        while self._starting and now_s - self._starting[0][0] >= STARTING_FOR_S:
            self._starting.popleft()

    async def _look_at_others(self, now_s: float) -> None:
        if now_s - self._others_s >= OTHERS_EVERY_S:
            self._others_s = now_s
            self._others = await self._stored.others_bytes(self._reading)

    def _awake(self, status: Mapping[str, Any] | None = None) -> Counter[str]:
        replicas = (status or self._means.loop_status())["replicas"]
        return Counter(replica["model"] for replica in replicas if replica["state"] in AWAKE)

    def _room(self) -> int:
        return self._reading.available - self.reserve - sum(needed for _, needed in self._starting)

    # --- status and notes -------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For `/admin/v1/status`, in bytes."""
        return {
            "available_bytes": self._reading.available,
            "total_bytes": self._reading.total,
            "where": self._reading.where,
            "reserve_bytes": self.reserve,
            "swap_used_bytes": self._reading.swap_used,
            "others_bytes": self._others if self._state.holds_back else None,
            "short": self._state.short,
            "waiting_jobs": list(self._state.jobs),
            "waiting_models": sorted(self._wanted),
            "given_back": list(self._told),
        }

    def notes(self) -> list[str]:
        """What users should know now, one sentence each."""
        if not self._state.holds_back and not self._wanted:
            return []
        waiting = [
            *(["training waits"] if self._state.jobs else []),
            *([f"{', '.join(sorted(self._wanted))} waits for an engine"] if self._wanted else []),
            *([f"{', '.join(sorted(self._state.engines))} has fewer engines"] if self._state.engines else []),
        ]
        have = f"{gb(self._reading.available)} available{self._of_others()}"
        of = "" if self._node == HOME_NODE else f" of {self._node}"
        word = f"memory{of} is short" if self._state.short else f"memory{of} was short"
        return [f"{word}: {have}{'; ' if waiting else ''}{'; '.join(waiting)}"]

    def _why(self) -> str:
        return f" ({gb(self._reading.available)} available{self._of_others()})"

    def _of_others(self) -> str:
        # Counted less often than the available memory: limited so that both together never exceed the machine's memory.
        if self._others is None:
            return ""
        return f", other programs hold {gb(min(self._others, self._reading.total - self._reading.available))}"


def _asked_lately(asked: Mapping[str, tuple[int, float]], now_s: float) -> dict[str, tuple[int, float]]:
    """For each name its bytes, and when they were last asked for."""
    return {name: (needed, at_s) for name, (needed, at_s) in asked.items() if now_s - at_s < WANTED_FOR_S}
