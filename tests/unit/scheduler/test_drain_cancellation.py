"""A drain whose reason is gone is taken back: the engine goes on as if nothing had been, and nobody took its device."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from scheduler.core.workload import DeploymentView, Policy
from tests.unit.scheduler.fakes import FakeStore, in_virtual_time
from tests.unit.scheduler.test_loop import JOB, MODEL, Rig

LONG_STREAM_S = 300.0


class DrainingRig(Rig):
    """A box whose engines have a stream to finish that takes minutes."""

    async def __aenter__(self) -> Rig:
        await super().__aenter__()
        self.effects.seconds["drain_replica"] = LONG_STREAM_S
        return self

    async def change(self, policy: Policy, after_s: float = 0.0) -> None:
        self.store.policy = policy
        self.loop.nudge()
        await asyncio.sleep(after_s)

    def verbs(self) -> set[str]:
        return {verb for verb, _ in self.world.verbs_done}


@in_virtual_time
async def test_a_mode_that_flips_back_takes_the_drain_back() -> None:
    async with DrainingRig(FakeStore(Policy("serve"), (JOB,), (MODEL,))) as rig:
        await rig.settle()
        await rig.change(Policy("train"), 40.0)
        assert rig.loop.status()["replicas"][0]["state"] == "draining"
        began_s = rig.now_s
        await rig.change(Policy("serve"))
        await rig.settle()
        assert rig.now_s - began_s < 1.0, "nobody waited for the stream"
        assert rig.states() == ["open"] and rig.jobs() == {}
        assert not rig.verbs() & {"sleep_replica", "wake_replica", "start_group", "suspend_group"}
        record = rig.journal.since(0)[-1]
        assert record.state == "undone"
        assert record.error == "cancelled: mode serve keeps replica r1-0 open"
        assert {s.verb: s.state for s in record.steps if s.undoes is None} == {"drain_replica": "skipped"}
        assert [s.verb for s in record.steps if s.undoes is not None] == ["open_replica"]


@in_virtual_time
async def test_requests_that_come_take_a_drain_back_under_auto() -> None:
    model = DeploymentView("m", "v1", max_replicas=1)
    async with DrainingRig(FakeStore(Policy("auto"), (replace(JOB, sizes=(4,)),), (model,))) as rig:
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"]
        rig.store.ask("m", now_s=rig.now_s)
        await asyncio.sleep(120.0)  # longer than the model is kept without a request
        assert rig.loop.status()["replicas"][0]["state"] == "draining"
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"] and "sleep_replica" not in rig.verbs()
