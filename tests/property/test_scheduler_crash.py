"""Kill the controller, every engine and every group before, in and after every step, and again at every step of the
recovery; fail every step. All lives of the controller share the world (devices, processes), the store and the journal,
as after a kill -9. Each new life continues the same script of mode changes, and the end state must equal that of the
undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from benchmarks.simulator import virtual_time
from benchmarks.simulator.journal import MemoryJournal
from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed
from scheduler.core.workload import DeploymentView, JobView, Policy
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import Crash, FakeEffects, FakeStore, World, box_of

# Rare observations make events and the rounds after a failure matter more, and take a third of the time.
CONFIG = SchedulerConfig(replica_attempts=5, job_attempts=5, observe_every_s=150.0)
Hook = Callable[[FakeEffects, str, str, str], None]
"""Called at every point of a life with the effects, and point, verb and target (see FakeEffects)."""


def nothing(effects: FakeEffects, when: str, verb: str, target: str) -> None:
    pass


@dataclass
class Scenario:
    """A script of changes to the store; the box settles after each change."""

    script: tuple[Callable[[FakeStore], None], ...]
    store: Callable[[], FakeStore]
    world: World = field(default_factory=lambda: World(box_of(4)))


def mode(policy: Policy) -> Callable[[FakeStore], None]:
    return lambda store: setattr(store, "policy", policy)


def version(model: str, name: str) -> Callable[[FakeStore], None]:
    def change(store: FakeStore) -> None:
        store.deployments[model] = replace(store.deployments[model], version=name)

    return change


def drop(job_id: str) -> Callable[[FakeStore], None]:
    return lambda store: store.jobs.pop(job_id, None) and None


def there_and_back() -> Scenario:
    """Serve -> train -> serve with one resizable job, two engines and a new version in between."""
    return Scenario(
        script=(
            mode(Policy("split", 2)),
            mode(Policy("train")),
            version("a", "v2"),
            mode(Policy("split", 2)),
            mode(Policy("serve")),
        ),
        store=lambda: FakeStore(
            Policy("serve"), (JobView("j1", (1, 2, 4)),), (DeploymentView("a", "v1", min_replicas=1, max_replicas=2),)
        ),
    )


def short() -> Scenario:
    """A swap under load, then all devices to training and back: every verb once, few enough for all pairs."""
    return Scenario(
        script=(version("a", "v2"), mode(Policy("train")), mode(Policy("serve"))),
        store=lambda: FakeStore(
            Policy("split", 1), (JobView("j1", (1, 2)),), (DeploymentView("a", "v1", min_replicas=1),)
        ),
        world=World(box_of(2)),
    )


def several() -> Scenario:
    """Two jobs (one is cancelled while it runs), two models, one of them tensor-parallel, a device cordoned."""

    def cordon(store: FakeStore) -> None:
        store.cordoned = frozenset({"n0/1"})

    return Scenario(
        script=(mode(Policy("auto")), mode(Policy("train")), drop("j1"), mode(Policy("serve")), cordon),
        store=lambda: FakeStore(
            Policy("serve"),
            (JobView("j1", (1, 2), submitted_s=1.0), JobView("j2", (1, 2), submitted_s=2.0)),
            (
                DeploymentView("a", "v1", tensor_parallel=2, min_replicas=1, max_replicas=1),
                DeploymentView("b", "v1", min_replicas=1, max_replicas=1),
            ),
        ),
    )


@dataclass
class Run:
    """One run of a scenario through one or more lives."""

    scenario: Scenario
    hooks: list[Hook]
    orphans_finish: bool = False
    hook_calls: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world, self.store, self.journal = self.scenario.world, self.scenario.store(), MemoryJournal()
        self.now_s, self.at = 0.0, -1

    def go(self) -> Run:
        while self.at < len(self.scenario.script):
            hook = self.hooks.pop(0) if self.hooks else nothing
            self.hook_calls.append(0)

            effects = FakeEffects(self.world)

            def counted(when: str, verb: str, target: str, hook: Hook = hook, effects: FakeEffects = effects) -> None:
                self.hook_calls[-1] += 1
                hook(effects, when, verb, target)

            effects.hook = counted
            virtual_time.run(self._life(effects), self.now_s)
            if not effects.alive and self.orphans_finish:
                effects.finish_orphans()
        self.check()
        return self

    async def _life(self, effects: FakeEffects) -> None:
        journal = _JournalOf(effects, self.journal)
        clock = virtual_time.now_s
        loop = SchedulerLoop(effects, self.store, journal, clock=clock, config=CONFIG)
        task = asyncio.create_task(loop.run())
        try:
            while self.at < len(self.scenario.script):
                if self.at >= 0:
                    self.scenario.script[self.at](self.store)
                settled = asyncio.create_task(loop.wait_settled(loop.nudge()))
                await asyncio.wait({task, settled}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    settled.cancel()
                    task.result()
                    raise AssertionError("the loop ended by itself")
                await asyncio.sleep(200.0)  # let backoffs and dwells pass
                settled = asyncio.create_task(loop.wait_settled(loop.nudge()))
                await asyncio.wait({task, settled}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    settled.cancel()
                    task.result()
                self.at += 1
        except Crash:
            pass
        finally:
            self.now_s = clock() + 1.0
            loop.stop()
            await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        world, store = self.world, self.store
        world.check()
        assert not store.ended, f"a job was lost: {store.ended}"
        assert {r.state for r in world.replicas.values()} <= {"open", "asleep"}
        assert not self.journal.unfinished()
        for record in self.journal.since(0):
            assert record.state in ("done", "undone", "failed") and record.ended_s is not None

    def end(self) -> tuple[object, ...]:
        """State that must not depend on the disturbances: models served and job sizes, not replica names."""
        return (
            sorted((r.model, r.version, len(r.devices)) for r in self.world.replicas.values() if r.state == "open"),
            sorted((g.job_id, len(g.devices)) for g in self.world.groups.values()),
        )


class _JournalOf(MemoryJournal):
    """The journal of one controller life: writes raise Crash once that life is dead."""

    def __init__(self, effects: FakeEffects, inner: MemoryJournal):
        self.__dict__ = inner.__dict__
        self._effects_of_life = effects

    def _guard(self) -> None:
        if not self._effects_of_life.alive:
            raise Crash

    def begin(self, *record):  # noqa: ANN002, ANN201
        self._guard()
        super().begin(*record)

    def step(self, handover_id, record):  # noqa: ANN001, ANN201
        self._guard()
        super().step(handover_id, record)

    def end(self, handover_id, state, ended_s, error=""):  # noqa: ANN001, ANN201
        self._guard()
        super().end(handover_id, state, ended_s, error)
        if state == "undone" and "interrupted" not in error:
            self._check_undone(handover_id)

    def _check_undone(self, handover_id: int) -> None:
        """Check that unfinished moves released their devices and engines, without help by later rounds."""
        world = self._effects_of_life.world
        record = next(one for one in self.since(handover_id - 1) if one.id == handover_id)
        short = {s.chain for s in record.steps if s.undoes is None and s.state != "done"}
        taken = {s.target for s in record.steps if s.verb in ("acquire", "start_replica") and s.chain in short}
        left = [g for g in world.groups.values() if g.run in taken] + [r for r in world.replicas if r in taken]
        assert not left, f"{record} is undone and left {left}"


def crash_at(n: int) -> Hook:
    left = n

    def hook(effects: FakeEffects, when: str, verb: str, target: str) -> None:
        nonlocal left
        if left == 0:
            left = -1
            raise Crash
        left -= 1

    return hook


def fail_at(*points: int) -> Hook:
    count = -1

    def hook(effects: FakeEffects, when: str, verb: str, target: str) -> None:
        nonlocal count
        count += 1
        if count in points:
            raise EffectFailed(f"injected {when}")

    return hook


class KillAt:
    """At each (point, which), the which-th living engine or group dies by itself.

    `alive`: number of living processes at each passed point, after these deaths."""

    def __init__(self, *kills: tuple[int, int]):
        self.kills, self.alive = kills, []

    def __call__(self, effects: FakeEffects, when: str, verb: str, target: str) -> None:
        for point, which in self.kills:
            if point == len(self.alive):
                effects.kill(*effects.processes()[which])
        self.alive.append(len(effects.processes()))


SCENARIOS = [short, there_and_back, several]


@cache
def undisturbed(make: Callable[[], Scenario]) -> Run:
    return Run(make(), []).go()


def disturbed(make: Callable[[], Scenario], what: str, *hooks: Hook, orphans_finish: bool = False) -> Run:
    """Run a scenario with these hooks in its controllers' lives, and check that it ends like the undisturbed run."""
    run = Run(make(), list(hooks), orphans_finish).go()
    assert run.end() == undisturbed(make).end(), what
    return run


@pytest.mark.parametrize("make", SCENARIOS)
def test_undisturbed_run_succeeds(make: Callable[[], Scenario]) -> None:
    run = undisturbed(make)
    assert run.hook_calls[0] > 15
    assert {r.state for r in run.journal.since(0)} == {"done"}


@pytest.mark.parametrize("orphans_finish", [False, True])
@pytest.mark.parametrize("make", SCENARIOS)
def test_crash_at_every_point_reaches_same_end(make: Callable[[], Scenario], orphans_finish: bool) -> None:
    for n in range(undisturbed(make).hook_calls[0]):
        run = disturbed(make, f"crash at point {n}", crash_at(n), orphans_finish=orphans_finish)
        assert len(run.hook_calls) == 2, f"no crash at point {n}"


def explore_pairs(make: Callable[[], Scenario], orphans_finish: bool, begin: int = 0, every: int = 1) -> int:
    """Crash at points `begin` + n * `every`, and again at each point of the next life. Returns the number of runs."""
    explored = 0
    for first in range(begin, undisturbed(make).hook_calls[0], every):
        for second in range(10_000):
            what = f"crashes at points {first} and {second}"
            run = disturbed(make, what, crash_at(first), crash_at(second), orphans_finish=orphans_finish)
            if len(run.hook_calls) == 2:
                break  # the second life ended before its point
            explored += 1
    return explored


@pytest.mark.parametrize("orphans_finish", [False, True])
def test_crash_pairs_reach_same_end(orphans_finish: bool) -> None:
    """Each point comes first in pairs once: at even points verbs die with the controller, at odd points they finish."""
    explored = explore_pairs(short, orphans_finish, begin=int(orphans_finish), every=2)
    print(f"crash schedules explored: {explored}")
    assert explored > 250


@pytest.mark.soak
@pytest.mark.parametrize("orphans_finish", [False, True])
@pytest.mark.parametrize("make", SCENARIOS)
def test_crash_pairs_in_all_scenarios_reach_same_end(make: Callable[[], Scenario], orphans_finish: bool) -> None:
    explored = explore_pairs(make, orphans_finish)
    print(f"crash schedules explored: {explored}")
    assert explored > 1000


def explore_deaths(make: Callable[[], Scenario]) -> int:
    """At every point kill each living engine and group, in separate runs. Returns the number of runs."""
    disturbed(make, "no death", census := KillAt())
    deaths = [(point, which) for point, alive in enumerate(census.alive) for which in range(alive)]
    for point, which in deaths:
        disturbed(make, f"death of process {which} at point {point}", KillAt((point, which)))
    return len(deaths)


def explore_pairs_of_deaths(make: Callable[[], Scenario], nearby: int) -> int:
    """Kill as in explore_deaths, and another process up to `nearby` points later. Returns the number of runs."""
    disturbed(make, "no death", census := KillAt())
    explored = 0
    for first, alive in enumerate(census.alive):
        for which in range(alive):
            Run(make(), [after := KillAt((first, which))]).go()
            for second, left in enumerate(after.alive[first : first + nearby + 1], first):
                for other in range(left):
                    what = f"deaths of {which} at {first} and of {other} at {second}"
                    disturbed(make, what, KillAt((first, which), (second, other)))
                    explored += 1
    return explored


def explore_crash_and_death(make: Callable[[], Scenario], orphans_finish: bool) -> int:
    """Crash the controller at every point, and kill each engine and group at every point of the next life."""
    explored = 0
    for first in range(undisturbed(make).hook_calls[0]):
        Run(make(), [crash_at(first), after := KillAt()], orphans_finish).go()
        for second, alive in enumerate(after.alive):
            for which in range(alive):
                what, death = f"crash at {first}, then death of {which} at {second}", KillAt((second, which))
                disturbed(make, what, crash_at(first), death, orphans_finish=orphans_finish)
                explored += 1
    return explored


@pytest.mark.parametrize("make", SCENARIOS)
def test_process_death_at_every_point_reaches_same_end(make: Callable[[], Scenario]) -> None:
    explored = explore_deaths(make)
    print(f"death schedules explored: {explored}")
    assert explored > 40


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("make", SCENARIOS)
def test_crash_then_death_and_death_pairs_reach_same_end(make: Callable[[], Scenario]) -> None:
    explored = sum(explore_crash_and_death(make, orphans) for orphans in (False, True))
    explored += explore_pairs_of_deaths(make, nearby=12)
    print(f"crash and death schedules explored: {explored}")
    assert explored > 1000


@pytest.mark.parametrize("make", SCENARIOS)
def test_verb_failure_is_undone_or_overcome(make: Callable[[], Scenario]) -> None:
    for n in range(undisturbed(make).hook_calls[0]):
        run = disturbed(make, f"failure at point {n}", fail_at(n))
        # One failure is always undone or overcome; later rounds have nothing to repair.
        assert {r.state for r in run.journal.since(0)} <= {"done", "undone"}, f"failure at point {n}"


def test_verb_failure_pairs_nearby_reach_same_end() -> None:
    """The second failure is within the next twelve points: in the undo or retry of the first, or in a neighbour."""
    for n in range(undisturbed(short).hook_calls[0]):
        for m in range(n + 1, n + 13):
            disturbed(short, f"failures at points {n} and {m}", fail_at(n, m))
