"""A start of ranks that takes long keeps no devices from others: how long it takes is a matter of the job's data."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scheduler.core.inventory import Holder
from scheduler.core.workload import Policy
from scheduler.loop.loop import LONG_START_S
from tests.unit.scheduler.fakes import FakeStore, in_virtual_time
from tests.unit.scheduler.test_loop import JOB, MODEL, Rig

START_S = 500.0


class SlowlyStartingRig(Rig):
    async def __aenter__(self) -> Rig:
        await super().__aenter__()
        self.effects.seconds["start_group"] = START_S
        return self


@pytest.mark.parametrize("paused", [False, True])
@in_virtual_time
async def test_the_start_of_a_job_that_ended_or_was_paused_ends_at_once(paused: bool) -> None:
    async with SlowlyStartingRig(FakeStore(Policy("train"), (JOB,))) as rig:
        await asyncio.sleep(5.0)
        assert rig.loop.status()["handovers"] and rig.loop.box.holders
        began_s = rig.now_s
        if paused:
            rig.store.jobs["j1"] = replace(JOB, phase="paused")
        else:
            del rig.store.jobs["j1"]
        await rig.settle()
        assert rig.now_s - began_s < 5.0 and rig.loop.box.holders == {} and rig.jobs() == {}
        assert not rig.store.ended and not rig.store.troubles
        assert rig.journal.since(0)[-1].error == "cancelled: the job does not run any more"


@in_virtual_time
async def test_a_long_start_gives_way_when_its_devices_are_wanted_and_a_short_one_does_not() -> None:
    async with SlowlyStartingRig(FakeStore(Policy("auto"), (JOB,), (replace(MODEL, min_replicas=0),))) as rig:
        await asyncio.sleep(5.0)
        assert set(rig.loop.box.holders.values()) == {Holder("job", "j1")} and rig.states() == []
        rig.store.ask("m", held=1, now_s=rig.now_s)
        rig.loop.nudge()
        await asyncio.sleep(LONG_START_S - 10.0)
        assert rig.states() == [], "ranks that will soon be there are waited for"
        await asyncio.sleep(45.0)
        assert rig.states() == ["open"]
        assert not rig.store.ended and not rig.store.troubles
        await rig.settle()
        assert rig.states() == ["open"] and rig.jobs() == {"j1": 2}, "it goes on with what is left"


@in_virtual_time
async def test_a_long_start_that_gives_way_again_and_again_comes_to_its_end() -> None:
    job = replace(JOB, sizes=(4,))
    async with SlowlyStartingRig(FakeStore(Policy("auto"), (job,), (replace(MODEL, min_replicas=0),))) as rig:
        rig.effects.seconds["start_group"] = 200.0
        stopped, served = [], 0
        for _ in range(10):
            await asyncio.sleep(150.0)
            rig.store.ask("m", held=1, now_s=rig.now_s)
            rig.loop.nudge()
            while "open" not in rig.states():
                await asyncio.sleep(1.0)
            served += 1
            verbs = [verb for verb, _ in rig.world.verbs_done]
            if verbs.count("stop_group") > len(stopped):
                stopped.append(rig.now_s)
            rig.store.ask("m", held=0, now_s=rig.now_s)
            rig.loop.nudge()
        done = [verb for verb, _ in rig.world.verbs_done]
        assert served == 10 and done.count("suspend_group") > 2, "between two demands it runs"
        assert len(stopped) == 2, "after the second it has 240 s"
        assert not rig.store.ended
