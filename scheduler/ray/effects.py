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

from scheduler.core.errors import EffectFailed
from scheduler.handover.effects import Box
from scheduler.ray.groups import Groups, Jobs
from scheduler.ray.nodes import Nodes
from scheduler.ray.replicas import Replicas, Routing, Versions
from serve.core.config import EngineConfig

log = logging.getLogger(__name__)


class RayEffects(Replicas, Groups):
    """Implements `scheduler.handover.effects.Effects` in the controller's asyncio loop. Ray must be initialised."""

    def __init__(self, nodes: Nodes, routing: Routing, versions: Versions, jobs: Jobs, engine: EngineConfig):
        self._changed = asyncio.Event()
        Replicas.__init__(self, nodes, routing, versions, engine, self._changed.set)
        Groups.__init__(self, nodes, jobs, self._changed.set)

    async def watch(self) -> None:
        """Notice nodes that join and leave, for as long as it runs."""
        await self._nodes.watch(self._changed.set)

    async def observe(self) -> Box:
        await self._nodes.look()
        return Box.of(self._nodes.devices, await self.observe_replicas(), await self.observe_groups())

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def stop_everything(self) -> None:
        """End all engines and ranks; the box is stopping. Processes that remain end with Ray."""
        verbs = {replica_id: self.stop_replica(replica_id) for replica_id in self._engines}
        verbs |= {job_id: self.stop_group(job_id) for job_id in self._groups}
        ends = await asyncio.gather(*verbs.values(), return_exceptions=True)
        for holder_id, failed in zip(verbs, ends, strict=True):
            if isinstance(failed, EffectFailed):
                log.warning("%s did not stop: %s", holder_id, failed)
            elif failed is not None:
                raise failed
