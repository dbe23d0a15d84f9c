"""A node is lost, in virtual time, while an engine starts on it."""

from __future__ import annotations

import asyncio

from scheduler.core.workload import DeploymentView, Policy
from tests.unit.scheduler.fakes import FakeStore, box_of, in_virtual_time
from tests.unit.scheduler.test_loop import Rig


@in_virtual_time
async def test_node_lost_while_an_engine_starts_on_it_ends_that_start_alone():
    rig, lost = Rig(FakeStore(Policy("serve"), (), (DeploymentView("m", "v1", 1, 4, 4),))), list[str]()
    rig.world.devices = box_of(2, nodes=2)

    def lose(when: str, verb: str, target: str) -> None:
        if (when, verb) == ("before", "start_replica") and not lost:
            lost.append(target)
            rig.effects.lose_node("n1")

    rig.effects.hook = lose
    async with rig:
        await rig.settle()
        assert lost and {r.devices for r in rig.world.replicas.values()} == {("n0/0",), ("n0/1",)}
        rig.effects.node_is_back()
        rig.store.ask("m", inflight=100, held=100)
        await asyncio.sleep(60)  # in virtual time: its back-off is over
        await rig.settle()
        assert len({device for replica in rig.world.replicas.values() for device in replica.devices}) == 4
