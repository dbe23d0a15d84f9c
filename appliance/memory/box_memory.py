"""The memory of all hosts of the box: one `HostMemory` for home and one for each node that has joined.

A job may begin where there is memory for it; an engine that has no memory on its node waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from appliance.memory.host_memory import HostMemory, Means, Stored
from appliance.store.database import Database
from appliance.store.rows import JobRow
from scheduler.core.errors import EffectFailed
from scheduler.devices.discovery import HOME_NODE
from scheduler.devices.host_reading import MemoryReading

log = logging.getLogger(__name__)


class Away(Protocol):
    """The nodes that have joined; `scheduler.ray.nodes`. All that is asked of one raises EffectFailed if it is gone."""

    def memory(self) -> Mapping[str, MemoryReading]:
        """The last report of each node but home."""

    def alike(self) -> tuple[str, ...]:
        """Nodes on which jobs can run, home first."""

    async def of_agent(self, name: str, method: str, *arguments: Any) -> Any:
        """What `idle_bytes`, `trim_pool` or `evict` of a node's agent answers."""


class BoxMemory:
    """Call `look` every `LOOK_EVERY_S`. Runs entirely on the controller's loop. reserve: of each host; None: its own
    default. A node that has not reported yet refuses nothing."""

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
        self._db, self._reserve, self._clock = db, reserve, clock
        self._readings: dict[str, MemoryReading] = {}
        self._hosts = {HOME_NODE: home}

    def job_nodes(self, row: JobRow) -> tuple[str, ...]:
        """Nodes on which this job can run, those that have memory for it if any has: a job leaves a node that is
        short of it for one that is not."""
        alike = self._nodes.alike()
        return tuple(name for name in alike if not self._lacks(name, row)) or alike

    def job_sizes(self, row: JobRow) -> tuple[int, ...]:
        """The numbers of devices on which every node that has as many, and that the job can run on, has memory for it
        now. A node that has not reported yet may have any number."""
        nodes = self.job_nodes(row)
        each = [self._hosts[name].sizes(row) for name in nodes if name in self._hosts]
        sizes = set().union(*each) if self._hosts.keys() >= set(nodes) else self._means.job_bytes(row).keys()
        return tuple(size for size in sorted(sizes) if all(one.get(size, True) for one in each))

    def waits_for(self, row: JobRow) -> str:
        """Why this job cannot have memory on any node now, in a sentence; "" when it can, or already has it."""
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
        """How many sleeping engines may stay on each node; on a node that is not in it, the configured number may."""
        return {name: bound for name, host in self._hosts.items() if (bound := host.max_asleep()) is not None}

    def book_engine(self, model: str, node: str) -> bool:
        """Whether the memory of this node's host allows one more engine of the model."""
        return node not in self._hosts or self._hosts[node].book_engine(model)

    def too_large(self, model: str) -> str:
        """Why no host of the box is ever large enough for an engine of the model; "" where one may be."""
        told = [self._hosts[name].too_large(model) if name in self._hosts else "" for name in self._nodes.alike()]
        return told[0] if all(told) else ""

    async def look(self, status: Mapping[str, Any]) -> None:
        """Look at each host once. status: the loop's. A node that is gone affects only its own holders."""
        self._readings = {name: _named(reading, name) for name, reading in self._nodes.memory().items()}
        away = {name: self._hosts.get(name) or self._host(name) for name in self._readings}
        self._hosts = {HOME_NODE: self.home, **away}
        await self.home.look(status)
        for name, host in away.items():
            try:
                await host.look(status)
            except EffectFailed as error:
                log.warning("what memory needs on %s could not be done: %s", name, error, extra={"node": name})

    def _host(self, name: str) -> HostMemory:
        nodes = self._nodes
        stored = Stored(
            lambda: nodes.of_agent(name, "idle_bytes"),
            lambda: nodes.of_agent(name, "trim_pool"),
            lambda nbytes: nodes.of_agent(name, "evict", nbytes),
        )
        return HostMemory(self._db, stored, self._reserve, self._means, lambda: self._readings[name], self._clock, name)

    def status(self) -> dict[str, Any]:
        """For `/admin/v1/status`: of home, see HostMemory.status."""
        return self.home.status()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The same of each node that has joined."""
        return {name: host.status() for name, host in sorted(self._hosts.items()) if name != HOME_NODE}

    def notes(self) -> list[str]:
        """What users should know now, one sentence each."""
        return [note for host in self._hosts.values() for note in host.notes()]


def _named(reading: MemoryReading, node: str) -> MemoryReading:
    where = node if reading.where == "this machine" else f"{reading.where} of {node}"
    return replace(reading, where=where)
