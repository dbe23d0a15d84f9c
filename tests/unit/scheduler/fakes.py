"""Fake devices, engines and job groups that survive the death of a scheduler loop.

Every verb checks that a device has at most one holder and that no engine sleeps with open requests. A violation raises
AssertionError, never EffectFailed.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from benchmarks.simulator import virtual_time
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.failures import Failure
from scheduler.core.workload import Build, Demand, DeploymentView, Device, JobView, Policy, ReplicaView, Workload
from scheduler.handover.effects import Box, GroupEnded, GroupView


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test on a loop in virtual time, which starts at 1,000 s and jumps from timer to timer."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        virtual_time.run(test(*args, **named), start_s=1000.0)

    return run


SECONDS = {
    "start_replica": 1.5,
    "stop_replica": 0.05,
    "open_replica": 0.01,
    "drain_replica": 0.4,
    "sleep_replica": 0.1,
    "wake_replica": 0.7,
    "swap_replica": 0.15,
    "start_group": 1.0,
    "suspend_group": 0.5,
    "stop_group": 0.05,
}


class Crash(BaseException):
    """Simulates a kill of the controller; a BaseException, which no `except Exception` catches."""


def box_of(count: int, nodes: int = 1) -> tuple[Device, ...]:
    return tuple(Device(f"n{n}/{i}", f"n{n}", i, numa_node=i * 2 // count) for n in range(nodes) for i in range(count))


@dataclass
class World:
    """The actual devices and processes, shared by successive loops.

    answering: ids of open engines that have not drained or died; to stop one of these engines would abort requests."""

    devices: tuple[Device, ...]
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    groups: dict[str, GroupView] = field(default_factory=dict)
    answering: set[str] = field(default_factory=set)
    verbs_done: list[tuple[str, str]] = field(default_factory=list)

    def check(self) -> None:
        held = [d for devices in self.held.values() for d in devices]
        assert len(held) == len(set(held)), f"a device has two holders: {self.held}"

    @property
    def held(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return (kind, id) -> devices of each awake engine and each job group."""
        engines = {("replica", r.id): r.devices for r in self.replicas.values() if r.awake}
        return engines | {("job", g.job_id): g.devices for g in self.groups.values()}

    def change(self, replica_id: str, **changes: Any) -> None:
        self.replicas[replica_id] = replace(self.replicas[replica_id], **changes)
        if changes.get("state") in ("dead", "draining"):
            self.answering.discard(replica_id)


class FakeEffects:
    """The scheduler's verbs, which change a `World` and take virtual time.

    A verb calls `hook(when, verb, target)` "before" its start, "in" its middle (right after the effect) and
    "after" its end. The hook may raise EffectFailed or Crash."""

    def __init__(self, world: World, hook: Callable[[str, str, str], None] = lambda when, verb, target: None):
        self.world, self.hook = world, hook
        self.seconds = dict(SECONDS)
        self.hint = asyncio.Event()
        self.under_way: set[str] = set()
        self.gone: tuple[Device, ...] = ()
        self.not_yet: dict[str, Callable[[], None]] = {}
        self.alive = True

    def _hook(self, when: str, verb: str, target: str) -> None:
        if not self.alive:
            raise Crash
        try:
            self.hook(when, verb, target)
        except Crash:
            self.alive = False
            raise

    def finish_orphans(self) -> None:
        """Apply effects that a controller requested before it died."""
        for effect in self.not_yet.values():
            with contextlib.suppress(EffectFailed):
                effect()
        self.world.check()

    async def _verb(self, verb: str, target: str, effect: Callable[[], None]) -> dict[str, float]:
        assert target not in self.under_way, f"{verb} {target} while another verb for it is under way"
        self.under_way.add(target)
        try:
            self._hook("before", verb, target)
            self.not_yet[target] = effect
            await asyncio.sleep(self.seconds[verb] / 2)
            if not self.alive:
                raise Crash
            del self.not_yet[target]
            effect()
            self.world.check()
            self.world.verbs_done.append((verb, target))
            self._hook("in", verb, target)
            await asyncio.sleep(self.seconds[verb] / 2)
            self._hook("after", verb, target)
        except asyncio.CancelledError:
            if self.alive:  # only a live controller cancels an effect that it requested
                self.not_yet.pop(target, None)
            raise
        except EffectFailed:
            if verb == "open_replica":
                self.world.answering.discard(target)  # no gateway has learned that the engine is open
            raise
        finally:
            self.under_way.discard(target)
        return {"seconds": self.seconds[verb]}

    def _living(self, replica_id: str) -> ReplicaView:
        replica = self.world.replicas.get(replica_id)
        if replica is None or replica.state == "dead":
            raise EffectFailed("the engine is dead")
        return replica

    def _are_there(self, devices: tuple[str, ...]) -> None:
        """Raise EffectFailed if a lost node had one of these devices."""
        if not set(devices) <= {d.id for d in self.world.devices}:
            raise EffectFailed("a device is gone with its node")

    async def start_replica(self, plan: ReplicaView) -> dict[str, float]:
        def effect() -> None:
            self._are_there(plan.devices)
            assert plan.id not in self.world.replicas or self.world.replicas[plan.id].state == "ready"
            self.world.replicas[plan.id] = replace(plan, state="ready", since_s=0.0)

        return await self._verb("start_replica", plan.id, effect)

    async def stop_replica(self, replica_id: str) -> dict[str, float]:
        def effect() -> None:
            assert replica_id not in self.world.answering, f"{replica_id} stopped with requests"
            self.world.replicas.pop(replica_id, None)

        return await self._verb("stop_replica", replica_id, effect)

    async def open_replica(self, replica_id: str) -> dict[str, float]:
        def effect() -> None:
            if self._living(replica_id).state == "asleep":
                raise EffectFailed("it sleeps")
            self.world.change(replica_id, state="open")
            self.world.answering.add(replica_id)

        return await self._verb("open_replica", replica_id, effect)

    async def drain_replica(self, replica_id: str) -> dict[str, float]:
        def effect() -> None:
            self._living(replica_id)
            self.world.change(replica_id, state="draining")

        return await self._verb("drain_replica", replica_id, effect)

    async def sleep_replica(self, replica_id: str) -> dict[str, float]:
        def effect() -> None:
            replica = self._living(replica_id)
            assert replica.state in ("draining", "ready", "asleep"), f"{replica} put to sleep with requests"
            self.world.change(replica_id, state="asleep")

        return await self._verb("sleep_replica", replica_id, effect)

    async def wake_replica(self, replica_id: str, model: str, version: str) -> dict[str, float]:
        def effect() -> None:
            self._living(replica_id)
            self.world.change(replica_id, state="ready", model=model, version=version)

        return await self._verb("wake_replica", replica_id, effect)

    async def swap_replica(self, replica_id: str, model: str, version: str) -> dict[str, float]:
        def effect() -> None:
            self._living(replica_id)
            self.world.change(replica_id, model=model, version=version)

        return await self._verb("swap_replica", replica_id, effect)

    async def start_group(self, job_id: str, devices: tuple[str, ...], run: str) -> dict[str, float]:
        def effect() -> None:
            self._are_there(devices)
            group = self.world.groups.get(job_id)
            assert group is None or group.run == run, f"{job_id} would train twice"
            self.world.groups[job_id] = GroupView(job_id, devices, run=run)

        return await self._verb("start_group", job_id, effect)

    async def suspend_group(self, job_id: str) -> dict[str, float]:
        def effect() -> None:
            group = self.world.groups.pop(job_id, None)
            if group is not None and group.ended is not None:
                self.world.groups[job_id] = replace(group, devices=())

        detail = await self._verb("suspend_group", job_id, effect)
        return detail | ({"ended": 1.0} if job_id in self.world.groups else {})

    async def stop_group(self, job_id: str) -> dict[str, float]:
        return await self._verb("stop_group", job_id, lambda: self.world.groups.pop(job_id, None) and None)

    async def observe(self) -> Box:
        return Box.of(self.world.devices, self.world.replicas.values(), self.world.groups.values())

    async def changed(self) -> None:
        await self.hint.wait()
        self.hint.clear()

    # --- external events

    def processes(self) -> list[tuple[str, str]]:
        """Return sorted pairs (kind, id) of all engines and groups that have not ended."""
        engines = [("replica", r.id) for r in self.world.replicas.values() if r.state != "dead"]
        return sorted([*engines, *(("job", g.job_id) for g in self.world.groups.values() if g.ended is None)])

    def kill(self, kind: str, holder_id: str) -> None:
        """Kill an engine, or a rank of a group, which ends the group."""
        if kind == "replica":
            self.kill_replica(holder_id)
        else:
            self.end_group(holder_id, "failed", error="a rank was killed")

    def kill_replica(self, replica_id: str, reason: str = "killed", blame: Blame = "own") -> None:
        self.world.change(replica_id, state="dead", failed=reason, blame=blame)
        self.hint.set()

    def end_group(
        self, job_id: str, outcome: str, *, step: int = 0, error: str = "", retryable: bool = True, blame: Blame = "own"
    ) -> None:
        ended = GroupEnded(outcome, step, error, retryable, blame)
        self.world.groups[job_id] = replace(self.world.groups[job_id], ended=ended)
        self.hint.set()

    def lose_node(self, node: str) -> None:
        """Remove devices, engines and ranks of a node; ranks of the same groups on other nodes stay."""
        world, gone = self.world, {d.id for d in self.world.devices if d.node == node}
        self.gone = tuple(d for d in world.devices if d.id in gone)
        world.devices = tuple(d for d in world.devices if d.id not in gone)
        world.replicas = {k: r for k, r in world.replicas.items() if gone.isdisjoint(r.devices)}
        world.answering &= world.replicas.keys()
        for group in list(world.groups.values()):
            if not gone.isdisjoint(group.devices):
                left = tuple(d for d in group.devices if d not in gone)
                world.groups[group.job_id] = replace(group, devices=left)
                if group.ended is None:
                    self.end_group(group.job_id, "failed", error="its node was lost")
        self.hint.set()

    def node_is_back(self) -> None:
        self.world.devices = tuple(sorted((*self.world.devices, *self.gone), key=lambda d: d.id))
        self.gone = ()
        self.hint.set()


class Handle:
    """A fake actor handle: `handle.METHOD.remote(...)` calls the coroutine METHOD of `body`."""

    def __init__(self, body: Any):
        self._body = body

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any, **named: Any) -> Any:
            return await getattr(self._body, method)(*arguments, **named)

        return SimpleNamespace(remote=remote)


class FakeStore:
    """A state store with jobs and deployments that the test sets."""

    def __init__(
        self,
        policy: Policy = Policy("auto"),  # noqa: B008 (frozen)
        jobs: tuple[JobView, ...] = (),
        deployments: tuple[DeploymentView, ...] = (),
    ):
        self.policy = policy
        self.jobs = {j.id: j for j in jobs}
        self.deployments = {d.model: d for d in deployments}
        self.cordoned: frozenset[str] = frozenset()
        self.ended: dict[str, tuple[str, str]] = {}
        self.reasons: dict[str, str] = {}
        self.troubles: dict[str, Failure] = {}
        self.gone_back: list[str] = []

    def load(self, *, free_devices: int = 0) -> Workload:
        deployments = tuple(self.deployments.values())
        return Workload(self.policy, tuple(self.jobs.values()), deployments, self.cordoned)

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None:
        if job_id in self.jobs:
            self.jobs[job_id] = replace(self.jobs[job_id], phase="running")

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None:
        return

    def job_waiting(self, job_id: str, reason: str) -> None:
        self.reasons[job_id] = reason
        if job_id in self.jobs and self.jobs[job_id].phase == "running":
            self.jobs[job_id] = replace(self.jobs[job_id], phase="suspended")

    def job_ended(self, job_id: str, outcome: str, error: str) -> None:
        self.jobs.pop(job_id, None)
        self.ended[job_id] = (outcome, error)

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        if trouble is None:
            self.troubles.pop(model, None)
        else:
            self.troubles[model] = trouble

    def model_served(self, model: str, build: Build) -> None:
        self.deployments[model] = replace(self.deployments[model], served=build)

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        if self.deployments[model].settings == failed.settings:
            self.gone_back.append(reason)
            self.deployments[model] = replace(self.deployments[model], settings=served.settings)
        return True

    def ask(self, model: str, *, inflight: int = 0, held: int = 0, now_s: float | None = None) -> None:
        old = self.deployments[model]
        last = now_s if now_s is not None else old.demand.last_request_s
        self.deployments[model] = replace(old, demand=Demand(inflight, held, last_request_s=last))
