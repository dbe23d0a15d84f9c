"""A node of four is lost, in virtual time: what ran there starts elsewhere or waits, and the loop comes to rest."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.simulator import virtual_time
from benchmarks.simulator.journal import MemoryJournal
from scheduler.core.workload import DeploymentView, JobView, Policy
from scheduler.handover.effects import InventoryChanged
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, FakeStore, World, box_of, in_virtual_time


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4), (4, 4)])
@pytest.mark.parametrize("lost", ["n0", "n1", "n2", "n3"])
@in_virtual_time
async def test_the_loop_comes_to_rest_without_the_node(sizes, lost):
    nodes = tuple(f"n{n}" for n in range(4))
    jobs = tuple(JobView(f"j{i}", size, size, (size,), nodes=nodes) for i, size in enumerate(sizes))
    store = FakeStore(Policy("split", sum(sizes)), jobs, (DeploymentView("m", "v1", 4, 3, 3),))
    world = World(box_of(8, nodes=4))
    effects = FakeEffects(world)
    loop = SchedulerLoop(effects, store, MemoryJournal(), clock=virtual_time.VirtualClock())
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        assert {g.job_id: len(g.devices) for g in world.groups.values()} == {job.id: job.min_devices for job in jobs}
        gone = {device.id for device in world.devices if device.node == lost}
        world.devices = tuple(device for device in world.devices if device.id not in gone)
        world.replicas = {k: r for k, r in world.replicas.items() if not set(r.devices) & gone}
        world.groups = {k: g for k, g in world.groups.items() if not set(g.devices) & gone}
        effects.events.put_nowait(InventoryChanged())
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        world.check()
        ran = {g.job_id: len(g.devices) for g in world.groups.values()}
        assert all(ran.get(job.id) == job.min_devices or store.reasons.get(job.id) for job in jobs), ran
        assert not {d for devices in world.held.values() for d in devices} & gone
    finally:
        loop.stop()
        await running


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
