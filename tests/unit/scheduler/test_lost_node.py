"""A node of four is lost, in virtual time: what ran there starts elsewhere or waits, and the loop comes to rest."""

from __future__ import annotations

import asyncio

from benchmarks.simulator import virtual_time
from benchmarks.simulator.journal import MemoryJournal
from scheduler.core.workload import DeploymentView, Policy
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, FakeStore, World, box_of, in_virtual_time


@in_virtual_time
async def test_node_lost_while_an_engine_starts_on_it_ends_that_start_alone():
    world, store = World(box_of(2, nodes=2)), FakeStore(Policy("serve"), (), (DeploymentView("m", "v1", 1, 4, 4),))
    effects, lost = FakeEffects(world), list[str]()

    def lose(when: str, verb: str, target: str) -> None:
        if (when, verb) == ("before", "start_replica") and not lost:
            lost.append(target)
            effects.lose_node("n1")

    effects.hook = lose
    loop = SchedulerLoop(effects, store, MemoryJournal(), clock=virtual_time.VirtualClock())
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        assert lost and {r.devices for r in world.replicas.values()} == {("n0/0",), ("n0/1",)}
        effects.node_is_back()
        store.ask("m", inflight=100, held=100)
        await asyncio.sleep(60)  # in virtual time: its back-off is over
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        assert len({device for replica in world.replicas.values() for device in replica.devices}) == 4
    finally:
        loop.stop()
        await running
