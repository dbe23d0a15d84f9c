"""The memory of all hosts of the box: one `HostMemory` for home and one for each node that has joined.

The same policy decides for each host, from its node's reports, and its orders are carried out on that node. A job may
begin where there is memory for it; an engine that has no memory on its node waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from appliance.memory.host_memory import HostMemory, Means
from appliance.store.database import Database
from appliance.store.rows import JobRow
from scheduler.core.errors import EffectFailed
from scheduler.core.memory_reading import MemoryReading
from scheduler.devices.discovery import HOME_NODE

log = logging.getLogger(__name__)


class Away(Protocol):
    """The nodes that have joined; `scheduler.ray.nodes`. All that is asked of one raises EffectFailed if it is gone."""

    def memory(self) -> Mapping[str, MemoryReading]:
        """The last report of each node but home."""

    def alike(self) -> tuple[str, ...]:
        """Nodes on which jobs can run, home first."""

    async def idle_bytes(self, name: str) -> tuple[int, int]: ...

    async def trim_pool(self, name: str) -> int: ...

    async def evict(self, name: str, nbytes: int) -> int: ...


class StoredAway:
    """Bytes that the shared memory of a joined node holds and nobody needs there; `host_memory.Stored`."""

    def __init__(self, nodes: Away, name: str):
        self._nodes, self._name = nodes, name

    async def idle_bytes(self) -> tuple[int, int]:
        return await self._nodes.idle_bytes(self._name)

    async def trim_pool(self) -> int:
        return await self._nodes.trim_pool(self._name)

    async def evict(self, nbytes: int) -> int:
        return await self._nodes.evict(self._name, nbytes)


class BoxMemory:
    """Call `look` every `LOOK_EVERY_S`. Runs entirely on the controller's loop. reserve: of each host; None: its own
    default."""

    def __init__(
        self,
        db: Database,
        home: HostMemory,
        nodes: Away,
        reserve: int | None,
        means: Means,
        clock: Callable[[], float] = time.time,
    ):
        self.home, self._nodes, self._means = home, nodes, means
        self._make = lambda name: HostMemory(
            db, StoredAway(nodes, name), reserve, means, lambda: self._readings[name], clock, name
        )
        self._readings: dict[str, MemoryReading] = {}
        self._away: dict[str, HostMemory] = {}

    # --- asked by the loop ----------------------------------------------------------------------------------------

    def job_nodes(self, row: JobRow) -> tuple[str, ...]:
        """Nodes on which this job can run, those that have memory for it if any has: a job leaves a node that is
        short of it for one that is not."""
        alike = self._nodes.alike()
        return tuple(name for name in alike if not self._lacks(name, row)) or alike

    def job_sizes(self, row: JobRow) -> tuple[int, ...]:
        """The numbers of devices on which every node that has as many, and that the job can run on, has memory for it
        now. The smallest node bounded jobs on the others. A node that has not reported yet may have any number."""
        hosts, nodes = self._hosts(), self.job_nodes(row)
        each = [hosts[name].sizes(row) for name in nodes if name in hosts]
        sizes = set().union(*each) if hosts.keys() >= set(nodes) else self._means.job_bytes(row).keys()
        return tuple(size for size in sorted(sizes) if all(one.get(size, True) for one in each))

    def waits_for(self, row: JobRow) -> str:
        """Why this job cannot have memory on any node now, in a sentence; "" when it can, or already has it."""
        alike = self._nodes.alike()
        lacking = [self._lacks(name, row) for name in alike]
        if not all(lacking):
            return ""
        for name in alike:
            self._hosts()[name].want(row)
        return lacking[0]

    def _lacks(self, name: str, row: JobRow) -> str:
        """Nothing if the node has not reported yet: its jobs must not be suspended for that."""
        host = self._hosts().get(name)
        return "" if host is None else host.lacks(row)

    def max_asleep(self) -> dict[str, int]:
        """How many sleeping engines may stay on each node; on a node that is not in it, the configured number may."""
        bounds = {name: host.max_asleep() for name, host in self._hosts().items()}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def book_engine(self, model: str, node: str) -> bool:
        """Whether the memory of this node's host allows one more engine of the model."""
        host = self._hosts().get(node)
        return host is None or host.book_engine(model)

    def too_large(self, model: str) -> str:
        """Why no host of the box is ever large enough for an engine of the model; "" where one may be."""
        hosts = self._hosts()
        if not hosts.keys() >= set(self._nodes.alike()):
            return ""  # one has not reported yet, as after each start of the controller: a canary was rolled back
        told = [host.too_large(model) for host in hosts.values()]
        return told[0] if all(told) else ""

    # --- one pass ---------------------------------------------------------------------------------------------------

    async def look(self, status: Mapping[str, Any]) -> None:
        """Look at each host once. status: the loop's. A node that is gone affects only its own holders."""
        await self.home.look(status)
        self._follow()
        for name, host in list(self._away.items()):
            try:
                await host.look(status)
            except EffectFailed as error:
                log.warning("what memory needs on %s could not be done: %s", name, error, extra={"node": name})

    def _follow(self) -> None:
        """Takes in what nodes have reported, and drops those that are gone."""
        self._readings = {name: _named(reading, name) for name, reading in self._nodes.memory().items()}
        self._away = {name: self._away.get(name) or self._make(name) for name in self._readings}

    def _hosts(self) -> dict[str, HostMemory]:
        return {HOME_NODE: self.home, **self._away}

    # --- status and notes -------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For `/admin/v1/status`: of home, see HostMemory.status."""
        return self.home.status()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The same of each node that has joined."""
        return {name: host.status() for name, host in sorted(self._away.items())}

    def notes(self) -> list[str]:
        """What users should know now, one sentence each."""
        return [note for host in self._hosts().values() for note in host.notes()]


def _named(reading: MemoryReading, node: str) -> MemoryReading:
    where = node if reading.where == "this machine" else f"{reading.where} of {node}"
    return replace(reading, where=where)
