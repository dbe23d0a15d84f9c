"""A node of four is lost, in virtual time: what ran there starts elsewhere or waits, and the loop comes to rest."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, JobView, Policy
from scheduler.handover.effects import InventoryChanged
from scheduler.handover.journal import MemoryJournal
from scheduler.loop.loop import SchedulerLoop
from scheduler.simulator import virtual_time
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
    loop = SchedulerLoop(virtual_time.VirtualClock(), SchedulerConfig()).connect(effects, store, MemoryJournal())
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        assert {g.job_id: len(g.devices) for g in world.groups.values()} == {job.id: job.min_devices for job in jobs}
        gone = {device.id for device in world.devices if device.node == lost}
        world.devices = tuple(device for device in world.devices if device.id not in gone)
        dead = {lease.id for lease in world.leases.values() if set(lease.device_ids) <= gone}
        for name in dead:
            del world.leases[name]
        world.replicas = {k: r for k, r in world.replicas.items() if not set(r.devices) & gone}
        world.groups = {k: g for k, g in world.groups.items() if not set(g.devices) & gone}
        effects.events.put_nowait(InventoryChanged())
        async with asyncio.timeout(600):
            await loop.wait_settled(loop.nudge())
        world.check()
        ran = {g.job_id: len(g.devices) for g in world.groups.values()}
        assert all(ran.get(job.id) == job.min_devices or store.reasons.get(job.id) for job in jobs), ran
        assert not {d for lease in world.leases.values() for d in lease.device_ids} & gone
    finally:
        loop.stop()
        await running
