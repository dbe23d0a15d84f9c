"""The loop under random lives: jobs, traffic, modes, deaths, failing verbs and kill -9 in any order.

Invariants. In every verb (see fakes.World): one holder per device, no engine sleeps with requests. After every step: no
job is lost. At rest: the world matches the plan (convergence), the box knows exactly the living processes, and no
device idles that a holder could use (work conservation). From any state, once faults have ended, every model with
demand and every job that may run has its devices again within a bounded time, without intervention (recovery). Without
changes, only turn-taking causes hand-overs (no flapping), and every job that fits runs within a bounded number of job
ends (no starvation).
"""

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.simulator.journal import MemoryJournal
from benchmarks.simulator.virtual_time import VirtualLoop, now_s
from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.workload import Demand, DeploymentView, JobView, Policy
from scheduler.loop.loop import SchedulerLoop
from tests.unit.scheduler.fakes import FakeEffects, FakeStore, World, box_of

CONFIG = SchedulerConfig(
    target_inflight=4,
    give_back_after_s=20,
    give_back_at_latest_s=20,
    job_dwell_s=15,
    turn_s=10,
    backoff_max_s=8,
    start_backoff_max_s=8,
    # Injected failures are no fault of a job, so no job ends by them here; test_loop has those cases.
    job_attempts=10_000,
)
RECOVERY_S = CONFIG.observe_every_s + CONFIG.backoff_max_s + 30.0
"""Time for an unreported death to be observed, backoffs to pass, and engines and ranks to start."""
MODELS = ("a", "b", "wide")
BOX = box_of(3, nodes=2)

policies = st.one_of(
    st.builds(Policy, st.just("serve")),
    st.builds(Policy, st.just("train"), serving_floor=st.integers(0, 2)),
    st.builds(Policy, st.just("split"), st.integers(0, 6), st.integers(0, 2)),
    st.builds(Policy, st.just("auto"), serving_floor=st.integers(0, 2)),
)
demands = st.builds(Demand, inflight=st.sampled_from([0, 0, 1, 5, 30]), held=st.sampled_from([0, 0, 1, 9]))
blames = st.sampled_from(["own", "own", "outside", "memory"])
seconds = st.sampled_from([0.02, 0.3, 1.0, 7.0, 60.0])


class SchedulerMachine(RuleBasedStateMachine):
    steps = 0
    verbs = 0

    def __init__(self) -> None:
        super().__init__()
        self.aio = VirtualLoop(1000.0)
        self.world = World(BOX)
        self.store, self.journal = FakeStore(), MemoryJournal(keep=50)
        self.submitted: set[str] = set()
        self.cancelled: set[str] = set()
        self.to_fail = 0
        self.blame: Blame = "own"
        self.job_nodes: tuple[str, ...] = ()
        self.start()

    # --- lives

    @initialize(nodes=st.sampled_from([(), (), ("n0",), ("n0", "n1")]))
    def where_jobs_may_run(self, nodes: tuple[str, ...]) -> None:
        self.job_nodes = nodes

    def start(self) -> None:
        self.effects = FakeEffects(self.world, self.hook)
        self.loop = SchedulerLoop(self.effects, self.store, self.journal, clock=now_s, config=CONFIG)
        self.task = self.aio.create_task(self.loop.run())

    def hook(self, when: str, verb: str, target: str) -> None:
        if self.to_fail and when != "after":
            self.to_fail -= 1
            raise EffectFailed("injected", self.blame)

    def pass_time(self, seconds_: float) -> None:
        self.aio.run_until_complete(asyncio.sleep(seconds_))
        if self.task.done():
            self.task.result()

    def settle(self) -> None:
        waiting = self.aio.create_task(self._settle())
        self.aio.run_until_complete(waiting)

    async def _settle(self) -> None:
        began = self.journal.last_id()
        try:
            async with asyncio.timeout(3600):
                await self.loop.wait_settled(self.loop.nudge())
        except TimeoutError:
            recent = [f"{r.id} {r.state} {r.reason} {r.error}" for r in self.journal.since(0)[:-7:-1]]
            raise AssertionError(
                f"never at rest: {self.journal.last_id() - began} hand-overs, {recent}, {self.loop._transitions}"
            ) from None

    def changed(self) -> None:
        self.loop.nudge()
        self.pass_time(0.05)

    # --- rules: events

    @rule(policy=policies)
    def set_mode(self, policy: Policy) -> None:
        self.store.policy = policy
        self.changed()

    @precondition(lambda self: len(self.store.jobs) < 6)
    @rule(
        least=st.integers(1, 3),
        extra=st.integers(0, 4),
        powers=st.booleans(),
        priority=st.integers(0, 2),
        preemptible=st.booleans(),
        owner=st.sampled_from(["ann", "bob"]),
    )
    def submit(self, least: int, extra: int, powers: bool, priority: int, preemptible: bool, owner: str) -> None:
        name = f"j{len(self.submitted)}"
        most = min(least + extra, 6)
        sizes = tuple(s for s in (1, 2, 4) if least <= s <= most) if powers else ()
        sizes = sizes or tuple(range(least, most + 1))
        self.submitted.add(name)
        self.store.jobs[name] = JobView(
            name,
            sizes,
            nodes=self.job_nodes,
            priority=priority,
            submitted_s=self.aio.time(),
            preemptible=preemptible,
            owner=owner,
        )
        self.changed()

    @rule(model=st.sampled_from(MODELS), demand=demands)
    def traffic(self, model: str, demand: Demand) -> None:
        old = self.store.deployments.get(model) or DeploymentView(
            model,
            "v1",
            tensor_parallel=2 if model == "wide" else 1,
            min_replicas=1 if model == "a" else 0,
            max_replicas=3,
            idle_sleep_s=40.0 if model == "b" else None,
        )
        last_s = self.aio.time() if demand.requests else old.demand.last_request_s
        self.store.deployments[model] = replace(old, demand=replace(demand, last_request_s=last_s))
        self.changed()

    @precondition(lambda self: self.store.deployments)
    @rule(data=st.data(), version=st.sampled_from(["v1", "v2", "v3"]))
    def new_version(self, data: st.DataObject, version: str) -> None:
        model = data.draw(st.sampled_from(sorted(self.store.deployments)))
        self.store.deployments[model] = replace(self.store.deployments[model], version=version)
        self.changed()

    @precondition(lambda self: self.store.jobs)
    @rule(data=st.data(), what=st.sampled_from(["pause", "resume", "cancel"]))
    def change_job(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.jobs)))
        job = self.store.jobs[name]
        match what:
            case "pause":
                self.store.jobs[name] = replace(job, phase="paused")
            case "resume" if job.phase == "paused":
                self.store.jobs[name] = replace(job, phase="suspended")
            case "cancel":
                del self.store.jobs[name]
                self.cancelled.add(name)
        self.changed()

    @precondition(lambda self: any(g.ended is None for g in self.world.groups.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "failed"]), blame=blames)
    def group_ends(self, data: st.DataObject, outcome: str, blame: Blame) -> None:
        name = data.draw(st.sampled_from(sorted(g.job_id for g in self.world.groups.values() if g.ended is None)))
        self.effects.end_group(name, outcome, step=self.steps, error="a rank was killed", blame=blame)
        self.pass_time(0.05)

    @precondition(lambda self: any(r.state != "dead" for r in self.world.replicas.values()))
    @rule(data=st.data(), blame=blames)
    def engine_dies(self, data: st.DataObject, blame: Blame) -> None:
        name = data.draw(st.sampled_from(sorted(r.id for r in self.world.replicas.values() if r.state != "dead")))
        self.effects.kill_replica(name, blame=blame)
        self.pass_time(0.05)

    @rule(device=st.sampled_from([d.id for d in BOX]))
    def cordon_or_lift(self, device: str) -> None:
        self.store.cordoned ^= {device}
        self.changed()

    @rule()
    def node_comes_or_goes(self) -> None:
        if self.effects.gone:
            self.effects.node_is_back()
        else:
            self.effects.lose_node("n1")
        self.pass_time(0.05)

    @rule(count=st.sampled_from([1, 2, 3, 30]), blame=blames)
    def verbs_fail(self, count: int, blame: Blame) -> None:
        self.to_fail, self.blame = count, blame

    @rule(orphans_finish=st.booleans())
    def kill_controller(self, orphans_finish: bool) -> None:
        self.effects.alive = False
        self.task.cancel()
        self.aio.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
        if orphans_finish:
            self.effects.finish_orphans()
        gone = self.effects.gone
        self.start()
        self.effects.gone = gone
        self.pass_time(0.05)

    @rule(seconds_=seconds)
    def time_passes(self, seconds_: float) -> None:
        self.pass_time(seconds_)

    # --- invariants

    @invariant()
    def no_job_is_lost(self) -> None:
        type(self).steps += 1
        self.world.check()
        known = set(self.store.jobs) | set(self.store.ended) | self.cancelled
        assert self.submitted <= known, f"lost: {self.submitted - known}"

    @rule()
    def faults_end(self) -> None:
        """After the last fault, check recovery without any event or nudge."""
        self.to_fail = 0
        until_s = self.aio.time() + RECOVERY_S
        while True:
            try:
                return self.check_work_conservation()
            except AssertionError as error:
                assert self.aio.time() < until_s, f"not recovered after {RECOVERY_S:.0f} s: {error}"
            self.pass_time(1.0)

    @rule()
    def at_rest(self) -> None:
        self.to_fail = 0
        self.settle()
        self.pass_time(70.0)  # backoffs, dwells and `give_back_after_s` run out
        self.settle()
        self.check_convergence()
        self.check_work_conservation()

    def check_convergence(self) -> None:
        holders = {device: (holder.kind, holder.id) for device, holder in self.loop.box.holders.items()}
        assert holders == {device: holder for holder, devices in self.world.held.items() for device in devices}
        assert {r.state for r in self.world.replicas.values()} <= {"open", "asleep"}
        assert {r.id: r.state for r in self.loop.box.replicas.values()} == {
            r.id: r.state for r in self.world.replicas.values()
        }
        assert not self.journal.unfinished()
        for replica in self.world.replicas.values():
            if replica.state == "open":
                assert replica.version == self.store.deployments[replica.model].version

    def usable(self) -> list[str]:
        return [d.id for d in self.world.devices if d.id not in self.store.cordoned]

    def check_work_conservation(self) -> None:
        usable, policy = self.usable(), self.store.policy
        held = {d for devices in self.world.held.values() for d in devices}
        assert held <= set(usable), "a holder is on a device that must not be used"
        free = [d for d in usable if d not in held]
        training = sum(len(g.devices) for g in self.world.groups.values())
        limit = {
            "serve": 0,
            "split": min(policy.train_devices or 0, len(usable) - min(policy.serving_floor, len(usable))),
            "train": len(usable) - min(policy.serving_floor, len(usable)),
            "auto": len(usable) - min(policy.serving_floor, len(usable)),
        }[policy.kind]
        for job in self.store.jobs.values():
            if job.phase == "paused" or job.id in self.world.groups:
                continue
            assert job.sizes[0] > min(room_for(job, free), limit - training), f"{job} waits, free: {free} ({policy})"
        for model, deployment in self.store.deployments.items():
            served = any(r.model == model and r.state == "open" for r in self.world.replicas.values())
            if deployment.demand.requests and not served:
                rooms = [sum(d.startswith(f"n{n}/") for d in free) for n in (0, 1)]
                assert max(rooms) < deployment.tensor_parallel, f"{model} has no engine although {free} are free"

    def teardown(self) -> None:
        try:
            self.at_rest()
            self.check_flapping()
            self.check_starvation()
        finally:
            type(self).verbs += len(self.world.verbs_done)
            self.loop.stop()
            self.aio.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
            self.aio.close()

    def check_flapping(self) -> None:
        before, minutes = self.journal.last_id(), 10
        self.pass_time(minutes * 60.0)
        asked = sum(d.demand.requests > 0 for d in self.store.deployments.values())
        turns = minutes * 60 / CONFIG.turn_s if asked > 1 else 0
        assert self.journal.last_id() - before <= 2 * turns + 1, "hand-overs although nothing changes"

    def check_starvation(self) -> None:
        """In mode train, check that every job that fits the box runs within as many job ends as there are jobs."""
        self.store.policy = Policy("train")
        self.store.cordoned = frozenset()
        self.effects.node_is_back()
        for job in list(self.store.jobs.values()):
            if job.sizes[0] > room_for(job, [d.id for d in self.world.devices]):
                del self.store.jobs[job.id]  # too large for each of its nodes
                continue
            self.store.jobs[job.id] = replace(job, phase="wanted" if job.phase == "paused" else job.phase)
        for _ in range(len(self.store.jobs) + 1):
            self.settle()
            self.pass_time(30.0)
            for name in [g.job_id for g in self.world.groups.values() if g.ended is None]:
                self.effects.end_group(name, "succeeded")
            self.pass_time(5.0)
        assert not self.store.jobs, f"never ran: {self.store.jobs}, {self.store.reasons}"


def room_for(job: JobView, free: Sequence[str]) -> int:
    """The most free devices on one of the nodes that the job may run on."""
    return max(sum(device_id.startswith(f"{node}/") for device_id in free) for node in job.nodes or ("n0", "n1"))


def explore(examples: int, steps: int) -> None:
    chosen = int(os.environ["SCHEDULER_SEED"])
    print(f"scheduler machine: SCHEDULER_SEED={chosen}", flush=True)
    SchedulerMachine.steps = SchedulerMachine.verbs = 0
    machine_settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=True,
    )
    run_state_machine_as_test(seed(chosen)(SchedulerMachine), settings=machine_settings)
    print(f"scheduler machine: {SchedulerMachine.steps} steps, {SchedulerMachine.verbs} verbs, 0 violations")


def explore_in_parts(monkeypatch, examples: int, wanted: int, first: int) -> None:
    """Explore in parts until `wanted` steps are done; the steps of an example are random. Each part has its own seed
    (from SCHEDULER_SEED or `first` upward), so that a failing part can be repeated alone."""
    first, done = int(os.environ.get("SCHEDULER_SEED", first)), 0
    for part in itertools.count():
        monkeypatch.setenv("SCHEDULER_SEED", str(first + part))
        explore(examples=examples, steps=100)
        done += SchedulerMachine.steps
        print(f"scheduler machine: {done:,} of {wanted:,} steps", flush=True)
        if done >= wanted:
            break


@pytest.mark.timeout(7200)  # `make test` runs it at the lowest priority
@pytest.mark.parametrize("half", [1, 2])  # in parallel on two cores
def test_random_lives_keep_invariants(monkeypatch, half: int) -> None:
    explore_in_parts(monkeypatch, examples=40, wanted=5_000, first=1_000_000 * half)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_lives_long_keep_invariants(capsys, monkeypatch) -> None:
    with capsys.disabled():
        drawn = random.SystemRandom().randrange(2**32)
        explore_in_parts(monkeypatch, examples=500, wanted=1_000_000, first=drawn)
