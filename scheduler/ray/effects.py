"""Implements the verbs of `scheduler.handover.effects` with Ray. Which file does which:

    replicas                      replicas              one actor per engine
    groups                        groups                one actor per device, holding its rank
    the nodes they run on         nodes                 the nodes; node is the actor on each of them

Ray places processes, and is never in the data path. Actors are named and outlive the controller, so a restarted one
finds them again in `observe`; who has a process on a device holds it. Only this package of `scheduler` imports Ray,
`serve` and `train`.
"""

from __future__ import annotations

import asyncio
import logging

from runtime.devices.kinds import kind_of
from scheduler.core.errors import EffectFailed
from scheduler.handover.effects import Event, Observed
from scheduler.ray.groups import Groups, Jobs
from scheduler.ray.nodes import Nodes, OnDeath
from scheduler.ray.replicas import Replicas, Routing, Versions
from serve.core.config import EngineConfig

log = logging.getLogger(__name__)


class RayEffects:
    """Implements `scheduler.handover.effects.Effects` in the controller's asyncio loop. Ray must be initialised."""

    def __init__(
        self,
        nodes: Nodes,
        routing: Routing,
        versions: Versions,
        jobs: Jobs,
        engine: EngineConfig,
        on_death: OnDeath = lambda device_ids, holder, reason: None,
    ):
        """on_death: called for each rank or engine that ends without being stopped. Logical CPU devices are left out:
        they are one piece of hardware, so a death on one of them is not evidence against it."""
        self._nodes, self._on_death = nodes, on_death
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._replicas = Replicas(nodes, routing, versions, engine, self._events.put_nowait)
        self._groups = Groups(nodes, jobs, self._events.put_nowait)
        self._replicas.on_death = self._groups.on_death = self._died

        self.start_replica, self.stop_replica = self._replicas.start_replica, self._replicas.stop_replica
        self.open_replica, self.drain_replica = self._replicas.open_replica, self._replicas.drain_replica
        self.sleep_replica, self.wake_replica = self._replicas.sleep_replica, self._replicas.wake_replica
        self.swap_replica, self.unload_adapter = self._replicas.swap_replica, self._replicas.unload_adapter
        self.resident_bytes = self._replicas.resident_bytes
        self.start_group, self.suspend_group = self._groups.start_group, self._groups.suspend_group
        self.stop_group, self.profile_group = self._groups.stop_group, self._groups.profile_group

    def _died(self, device_ids: tuple[str, ...], holder: str, reason: str) -> None:
        real = tuple(d.id for d in self._nodes.devices if d.id in device_ids and not kind_of(d.kind).on_host)
        if real:
            self._on_death(real, holder, reason)

    async def watch(self) -> None:
        """Turn nodes that join and leave into events, for as long as it runs."""
        await self._nodes.watch(self._events.put_nowait)

    async def observe(self) -> Observed:
        await self._nodes.look()
        return Observed(self._nodes.devices, await self._replicas.observe(), await self._groups.observe())

    async def next_event(self) -> Event:
        return await self._events.get()

    async def stop_everything(self) -> None:
        """End all engines and ranks; the box is stopping."""
        for stop_all in (self._replicas.stop_all, self._groups.stop_all):
            try:
                await stop_all()
            except EffectFailed as error:  # its remaining processes end with Ray
                log.warning("%s", error)
