"""A drain or a long start whose reason is gone is taken back, and others get its devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scheduler.core.workload import DeploymentView, Holder, Policy
from scheduler.loop.loop import LONG_START_S
from tests.unit.scheduler.fakes import FakeStore, in_virtual_time
from tests.unit.scheduler.test_loop import JOB, MODEL, Rig

LONG_STREAM_S, START_S = 300.0, 500.0


def verbs(rig: Rig) -> set[str]:
    return {verb for verb, _ in rig.world.verbs_done}


@in_virtual_time
async def test_a_mode_that_flips_back_takes_the_drain_back() -> None:
    async with Rig(FakeStore(Policy("serve"), (JOB,), (MODEL,))) as rig:
        rig.effects.seconds["drain_replica"] = LONG_STREAM_S
        await rig.settle()
        rig.store.policy = Policy("train")
        rig.loop.nudge()
        await asyncio.sleep(40.0)
        assert rig.loop.status()["replicas"][0]["state"] == "draining"
        began_s = rig.now_s
        rig.store.policy = Policy("serve")
        await rig.settle()
        assert rig.now_s - began_s < 1.0, "nobody waited for the stream"
        assert rig.states() == ["open"] and rig.jobs() == {}
        assert not verbs(rig) & {"sleep_replica", "wake_replica", "start_group", "suspend_group"}
        record = rig.journal.since(0)[-1]
        assert record.state == "undone"
        assert record.error == "cancelled: mode serve keeps replica r1-0 open"
        assert {s.verb: s.state for s in record.steps if s.undoes is None} == {"drain_replica": "skipped"}
        assert [s.verb for s in record.steps if s.undoes is not None] == ["open_replica"]


@in_virtual_time
async def test_requests_that_come_take_a_drain_back_under_auto() -> None:
    model = DeploymentView("m", "v1", max_replicas=1)
    async with Rig(FakeStore(Policy("auto"), (replace(JOB, sizes=(4,)),), (model,))) as rig:
        rig.effects.seconds["drain_replica"] = LONG_STREAM_S
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"]
        rig.store.ask("m", now_s=rig.now_s)
        await asyncio.sleep(120.0)  # longer than the model is kept without a request
        assert rig.loop.status()["replicas"][0]["state"] == "draining"
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"] and "sleep_replica" not in verbs(rig)


@pytest.mark.parametrize("paused", [False, True])
@in_virtual_time
async def test_the_start_of_a_job_that_ended_or_was_paused_ends_at_once(paused: bool) -> None:
    async with Rig(FakeStore(Policy("train"), (JOB,))) as rig:
        rig.effects.seconds["start_group"] = START_S
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
    async with Rig(FakeStore(Policy("auto"), (JOB,), (replace(MODEL, min_replicas=0),))) as rig:
        rig.effects.seconds["start_group"] = START_S
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
    async with Rig(FakeStore(Policy("auto"), (job,), (replace(MODEL, min_replicas=0),))) as rig:
        rig.effects.seconds["start_group"] = 200.0
        served = 0
        for _ in range(10):
            await asyncio.sleep(150.0)
            rig.store.ask("m", held=1, now_s=rig.now_s)
            rig.loop.nudge()
            while "open" not in rig.states():
                await asyncio.sleep(1.0)
            served += 1
            rig.store.ask("m", held=0, now_s=rig.now_s)
            rig.loop.nudge()
        done = [verb for verb, _ in rig.world.verbs_done]
        assert served == 10 and done.count("suspend_group") > 2, "between two demands it runs"
        assert done.count("stop_group") == 2, "after the second it has 240 s"
        assert not rig.store.ended
