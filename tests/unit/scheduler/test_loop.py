"""The scheduler loop on a fake world in virtual time: it retries, replaces, reverts moves, or gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.simulator import virtual_time
from benchmarks.simulator.journal import MemoryJournal
from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.workload import Allocation, Build, DeploymentView, Holder, JobView, Policy, ReplicaView
from scheduler.handover.effects import Box, GroupEnded, GroupView
from scheduler.handover.handover import moves
from scheduler.loop.cluster_state import ClusterState
from scheduler.loop.loop import LONG_START_S, SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, FakeStore, World, box_of, in_virtual_time


class Rig:
    """A running loop with its world, effects, store and journal."""

    def __init__(self, store: FakeStore, devices: int = 4, asked: dict[str, Any] | None = None, **config: float):
        self.world, self.store, self.journal = World(box_of(devices)), store, MemoryJournal()
        self.effects, self.asked = FakeEffects(self.world), asked or {}
        self.config = SchedulerConfig(**config)

    async def __aenter__(self) -> Rig:
        clock, asked = virtual_time.now_s, self.asked
        self.loop = SchedulerLoop(self.effects, self.store, self.journal, clock=clock, config=self.config, **asked)
        self.task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.loop.stop()
        await self.task

    async def settle(self) -> None:
        await self.loop.wait_settled(self.loop.nudge())

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def states(self) -> list[str]:
        return sorted(r.state for r in self.world.replicas.values())

    def jobs(self) -> dict[str, int]:
        return {g.job_id: len(g.devices) for g in self.world.groups.values()}


JOB = JobView("j1", (1, 2, 4))
MODEL = DeploymentView("m", "v1", min_replicas=1, max_replicas=1)


def failing(verb: str, when: str = "in", blame: Blame = "own") -> Callable[[str, str, str], None]:
    def hook(at: str, what: str, target: str) -> None:
        if (at, what) == (when, verb):
            raise EffectFailed("injected", blame)

    return hook


@in_virtual_time
async def test_loop_restarts_engine_killed_10_times_within_seconds() -> None:
    async with Rig(FakeStore(Policy("serve"), (), (MODEL,))) as rig:
        await rig.settle()
        for _ in range(10):
            (replica,) = rig.world.replicas.values()
            rig.effects.kill_replica(replica.id, "CUDA error")
            await asyncio.sleep(5)
            assert rig.states() == ["open"]
        trouble = rig.store.troubles["m"]
        assert "CUDA error" in trouble.reason and trouble.count == 10 and trouble.lasting
        await asyncio.sleep(100)
        await rig.settle()
        assert rig.store.troubles == {}, "an engine that stays open is not a trouble"


@in_virtual_time
async def test_loop_retries_at_once_after_a_change() -> None:
    changes = {
        "version": lambda rig: rig.store.deployments.update(m=replace(MODEL, version="v2")),
        "configuration": lambda rig: rig.loop.reset_failures("m"),
        "device": lambda rig: setattr(rig.store, "cordoned", frozenset()),
    }
    for what, change in changes.items():
        async with Rig(FakeStore(Policy("serve"), (), (MODEL,))) as rig:
            rig.store.cordoned = frozenset(["n0/3"])
            rig.effects.hook = failing("start_replica")
            await asyncio.sleep(400)
            rig.effects.hook = lambda at, verb, target: None
            change(rig)
            rig.loop.nudge()
            await asyncio.sleep(3)
            assert rig.states() == ["open"], what


@pytest.mark.parametrize("supervisor_first", [False, True], ids=["engine first", "supervisor first"])
@pytest.mark.parametrize("heard", [True, False], ids=["told", "only seen"])
@pytest.mark.parametrize("apart_s", [0.0, 0.01, 0.05, 0.06, 0.3, 1.0, 1.2, 2.0])
@in_virtual_time
async def test_loop_replaces_engine_that_dies_with_its_supervisor(
    apart_s: float, heard: bool, supervisor_first: bool
) -> None:
    """After the death of its supervisor, an engine is first reported dead without a model, then not at all."""
    async with Rig(FakeStore(Policy("split", train_devices=2), (JOB,), (MODEL,))) as rig:
        await rig.settle()
        (engine,) = rig.world.replicas.values()

        def dies(blame: Blame, **changes: object) -> None:
            if engine.id in rig.world.replicas:
                rig.world.change(engine.id, state="dead", failed="killed", blame=blame, **changes)
                if heard:
                    rig.effects.hint.set()

        deaths = [partial(dies, "own"), partial(dies, "outside", model="", version="", devices=())]
        for die in reversed(deaths) if supervisor_first else deaths:
            die()
            await asyncio.sleep(apart_s)
        rig.world.replicas.pop(engine.id, None)
        await asyncio.sleep(30.0 if heard else 30.0 + rig.config.observe_every_s)
        (now,) = rig.world.replicas.values()
        assert (now.state, now.model) == ("open", "m") and now.id != engine.id and rig.jobs() == {"j1": 2}
        assert len(rig.world.held) == 2


@in_virtual_time
async def test_observe_keeps_last_state_of_silent_supervisor() -> None:
    """The view of a silent supervisor may be old, so the last known state counts."""
    async with Rig(FakeStore(Policy("serve"), (), (MODEL,))) as rig:
        await rig.settle()
        done, observe = len(rig.world.verbs_done), rig.effects.observe

        async def silent() -> Box:
            seen = await observe()
            replicas = {k: replace(r, state="asleep", answered=False) for k, r in seen.replicas.items()}
            return replace(seen, replicas=replicas)

        rig.effects.observe = silent
        await asyncio.sleep(3 * rig.config.observe_every_s)
        assert len(rig.world.verbs_done) == done and rig.states() == ["open"]


@in_virtual_time
async def test_observe_fails_while_unknown_engine_is_silent() -> None:
    """The controller observes before its loop starts; the second observation does not wait for a silent engine."""
    world = World(box_of(1), {"r": ReplicaView("r", "", "", "dead", (), answered=False)})
    state = ClusterState(FakeEffects(world), virtual_time.now_s, SchedulerConfig(), FakeStore())
    assert not await state.observe({}) and not state.box.devices
    world.replicas["r"] = ReplicaView("r", "m", "v1", "open", ("n0/0",))
    assert await state.observe({}) and state.box.holders == {"n0/0": Holder("replica", "r")}


@in_virtual_time
async def test_observe_counts_engine_death_after_its_move() -> None:
    world = World(box_of(1), {"r": ReplicaView("r", "m", "v1", "open", ("n0/0",))})
    effects = FakeEffects(world)
    state = ClusterState(effects, virtual_time.now_s, SchedulerConfig(), FakeStore())
    await state.observe({})
    before = state.box.replicas["r"]
    effects.kill_replica("r")
    await state.observe({Holder("replica", "r"): None})
    assert state.box.replicas["r"] == before and not state.failures.models
    await state.observe({})
    assert state.box.replicas["r"].state == "dead" and state.failures.models["m"].count == 1


@in_virtual_time
async def test_job_finishing_during_suspend_does_not_restart() -> None:
    async with Rig(FakeStore(Policy("train"), (JOB,))) as rig:
        await rig.settle()
        observe = rig.effects.observe

        async def slow() -> Box:
            seen = await observe()
            await asyncio.sleep(1.0)
            return seen

        def finish(when: str, verb: str, target: str) -> None:
            if (when, verb) == ("before", "suspend_group"):
                rig.effects.end_group("j1", "succeeded")
            if (when, verb) == ("after", "suspend_group"):
                rig.store.policy = Policy("train")

        rig.effects.observe, rig.effects.hook = slow, finish
        rig.store.policy = Policy("serve")
        await rig.settle()
        assert rig.store.ended == {"j1": ("succeeded", "")} and rig.world.groups == {}
        assert [verb for verb, _ in rig.world.verbs_done].count("start_group") == 1


def test_engine_starts_without_waiting_for_group_of_ended_job() -> None:
    box = Box.of(box_of(1), (), [GroupView("j1", (), ended=GroupEnded("succeeded"))])
    wanted = Allocation((ReplicaView("r", "m", "v1", "open", ("n0/0",)),))
    found = moves(box, wanted)
    assert [move.how for move in found] == ["end", "start"] and not found[1].needs
    engine = replace(wanted.replicas[0], version="".join("v1"))
    assert moves(Box.of(box_of(1), [engine], ()), wanted) == (), "it serves that version"
    for state, waits in (("starting", True), ("asleep", False)):
        _, start = moves(Box.of(box_of(1), [ReplicaView("x", "m", "v1", state, ())], ()), wanted)
        assert bool(start.needs) is waits, "an engine that has not said where it is may be on any device"


@in_virtual_time
async def test_loop_replaces_engines_one_by_one_after_refused_swap() -> None:
    two = replace(MODEL, min_replicas=2, max_replicas=2)
    async with Rig(FakeStore(Policy("serve"), (), (two,)), devices=3) as rig:
        await rig.settle()
        rig.effects.hook = failing("swap_replica", "before", "version")
        least = [2]
        for version in ("v2", "v3"):
            rig.store.deployments["m"] = replace(two, version=version)
            settled = asyncio.ensure_future(rig.settle())
            while not settled.done():
                least.append(sum(r.state == "open" for r in rig.world.replicas.values()))
                await asyncio.sleep(0.05)
            assert [(r.version, r.state) for r in rig.world.replicas.values()] == [(version, "open")] * 2
        assert min(least) == 2, "one after the other, on the device that nobody has"
        tried = [step for handover in rig.journal.since(0) for step in handover.steps if step.state != "skipped"]
        assert [step.verb for step in tried].count("swap_replica") == 2, "one engine for each version"
        assert rig.store.troubles == {} and rig.loop.status()["troubles"] == []


@in_virtual_time
async def test_loop_stops_group_by_force_after_failed_suspends() -> None:
    async with Rig(FakeStore(Policy("train"), (JOB,), (MODEL,))) as rig:
        await rig.settle()
        rig.effects.hook = failing("suspend_group", "before")
        rig.store.policy = Policy("serve")
        await rig.settle()
        assert rig.jobs() == {} and rig.states() == ["open"] and rig.store.ended == {}
        verbs = [v for v, t in rig.world.verbs_done if t == "j1"]
        assert verbs[-1] == "stop_group"
        rig.store.policy = Policy("train")
        await rig.settle()
        assert rig.jobs() == {"j1": 4}


@in_virtual_time
async def test_loop_ends_hung_step_at_its_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(FakeStore(Policy("serve"), (), (MODEL,)), start_replica_timeout_s=60) as rig:
        rig.effects.seconds["start_replica"] = 10_000.0
        began_s = rig.now_s
        await asyncio.sleep(75)
        assert rig.now_s - began_s == 75
        last = rig.journal.since(0)[-5:][0]
        assert last.state == "undone" and "longer than its limit of 60 s" in last.error
        assert last.error in caplog.text, "as a warning"
        rig.effects.seconds["start_replica"] = 1.0
        await asyncio.sleep(100)
        assert rig.states() == ["open"]


@in_virtual_time
async def test_engine_start_waits_for_memory_without_blocking_others() -> None:
    admitted: dict[str, bool] = {}
    store = FakeStore(
        Policy("serve"),
        deployments=(replace(MODEL, min_replicas=1), DeploymentView("other", "v1", min_replicas=1, max_replicas=1)),
    )
    async with Rig(store, asked={"book_engine": lambda model, node: admitted.get(model, True)}) as rig:
        admitted["other"] = False
        await rig.settle()
        assert [r.model for r in rig.world.replicas.values()] == ["m"]
        admitted["other"] = True
        await rig.settle()
        assert sorted(r.model for r in rig.world.replicas.values()) == ["m", "other"]


@in_virtual_time
async def test_engine_too_large_for_machine_is_reported_and_takes_no_devices() -> None:
    store = FakeStore(Policy("auto"), jobs=(JOB,), deployments=(replace(MODEL, min_replicas=1),))
    booked: list[str] = []
    asked = {
        "book_engine": lambda model, node: booked.append(model) or True,
        "too_large": lambda model: f"an engine of {model} needs 900 GB, more than this machine has",
    }
    async with Rig(store, devices=1, asked=asked) as rig:
        await rig.settle()
        assert store.troubles["m"].lasting and "900 GB" in store.troubles["m"].reason
        assert "900 GB" in rig.loop.status()["troubles"][0]["message"]
        assert rig.world.replicas == {} and booked == [] and "j1" in rig.world.groups
        await asyncio.sleep(5 * rig.config.backoff_max_s)
        assert rig.world.replicas == {} and "j1" in rig.world.groups


SET_UP = replace(MODEL, settings="old", served=Build())


def no_engine_starts(rig: Rig, settings: str, blame: Blame = "own", *, of_settings: bool = True) -> None:
    """Make every start of an engine with these settings fail."""

    def hook(when: str, verb: str, target: str) -> None:
        engine = rig.world.replicas.get(target)
        if (when, verb) == ("in", "start_replica") and engine is not None and engine.settings == settings:
            rig.world.change(target, state="dead")
            raise EffectFailed("the engine refused", blame, of_settings=of_settings)

    rig.effects.hook = hook


def change(rig: Rig, **changes: object) -> None:
    rig.store.deployments["m"] = replace(rig.store.deployments["m"], **changes)


def set_ups(rig: Rig) -> list[tuple[str, str]]:
    return sorted((engine.state, engine.settings) for engine in rig.world.replicas.values())


@pytest.mark.parametrize("replicas", [1, 2])
@in_virtual_time
async def test_loop_reverts_settings_with_which_no_engine_starts(replicas: int) -> None:
    set_up = replace(SET_UP, min_replicas=replicas, max_replicas=replicas)
    async with Rig(FakeStore(Policy("serve"), (), (set_up,))) as rig:
        await rig.settle()
        assert rig.store.deployments["m"].served == Build("v1", 1, "old")
        no_engine_starts(rig, "new")
        change(rig, settings="new")
        began_s = rig.now_s
        await rig.settle()
        assert set_ups(rig) == [("open", "old")] * replicas and rig.store.gone_back == ["the engine refused"]
        assert not rig.store.troubles and not rig.loop.status()["troubles"]
        tries = 2 * rig.effects.seconds["start_replica"]
        assert rig.now_s - began_s < tries + 1.0, "without a wait between the two"


@pytest.mark.parametrize(
    ("blame", "changes"),
    [("memory", {}), ("outside", {}), ("own", {}), ("own", {"version": "v2"}), ("own", {"tensor_parallel": 2})],
)
@in_virtual_time
async def test_loop_keeps_settings_if_another_cause_is_possible(blame: Blame, changes: dict[str, object]) -> None:
    async with Rig(FakeStore(Policy("serve"), (), (SET_UP,))) as rig:
        await rig.settle()
        no_engine_starts(rig, "new", blame, of_settings=bool(changes))
        change(rig, settings="new", **changes)
        await rig.settle()
        assert not rig.store.gone_back and rig.store.troubles["m"].blame == blame


# --- reverted moves

LONG_STREAM_S, START_S = 300.0, 500.0


@in_virtual_time
async def test_drain_is_reverted_when_mode_flips_back() -> None:
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
        verbs = {verb for verb, _ in rig.world.verbs_done}
        assert not verbs & {"sleep_replica", "wake_replica", "start_group", "suspend_group"}
        record = rig.journal.since(0)[-1]
        assert record.state == "undone"
        assert record.error == "cancelled: mode serve keeps replica r1-0 open"
        assert {s.verb: s.state for s in record.steps if s.undoes is None} == {"drain_replica": "skipped"}
        assert [(s.verb, s.undoes) for s in record.steps if s.undoes is not None] == [("open_replica", 0)]


@in_virtual_time
async def test_drain_is_reverted_by_new_requests_under_auto() -> None:
    model = DeploymentView("m", "v1", max_replicas=1)
    async with Rig(FakeStore(Policy("auto"), (replace(JOB, sizes=(4,)),), (model,))) as rig:
        rig.effects.seconds["drain_replica"] = LONG_STREAM_S
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"]
        rig.store.ask("m", now_s=rig.now_s)
        await asyncio.sleep(120.0)  # longer than the idle limit of the model
        assert rig.loop.status()["replicas"][0]["state"] == "draining"
        rig.store.ask("m", inflight=1, now_s=rig.now_s)
        await rig.settle()
        assert rig.states() == ["open"] and "sleep_replica" not in [verb for verb, _ in rig.world.verbs_done]


@pytest.mark.parametrize("paused", [False, True])
@in_virtual_time
async def test_job_start_is_cancelled_when_job_ends_or_pauses(paused: bool) -> None:
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
        assert rig.journal.since(0)[-1].error == "cancelled: the job should not run any more"


@in_virtual_time
async def test_job_start_yields_devices_only_after_long_start() -> None:
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
async def test_job_start_completes_after_several_yields() -> None:
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
