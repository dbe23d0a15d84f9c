"""Simulated effects and store: the scheduler's own loop moves simulated engines of one or more models, and jobs.

Decides nothing. Verbs take the times of `VerbTimes` and act on the `Cluster` (requests) and the groups (training).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from benchmarks.simulator.cluster import Cluster
from scheduler.core.failures import Failure
from scheduler.core.inventory import Device
from scheduler.core.workload import (
    Build,
    Demand,
    DeploymentView,
    JobView,
    Policy,
    ReplicaState,
    ReplicaView,
    Standby,
    Workload,
)
from scheduler.handover.effects import Box, Detail, GroupEnded, GroupView

MODEL = "model"
"""The first model; further ones have the names that the set-up gives them."""
REPORT_S = 0.25
"""How often a gateway reports its load."""


@dataclass(frozen=True, slots=True)
class VerbTimes:
    """Seconds that verbs take. Defaults: a 7 B model in bf16 (13.5 GB) on an H100 behind PCIe 5 (50 GB/s one way).

    wake: copy the weights once over PCIe, plus half a second. start: a fork plus the same. suspend: 12 bytes per
    parameter of optimizer state over eight links. start_group: a fork of the ranks plus loading it back. step: one
    training step. A suspension abandons the step in progress, which is repeated later (see train.trainer.train),
    unless it ends within `patience` or is itself a repeat.
    """

    start_s: float = 2.5
    wake_s: float = 0.8
    sleep_s: float = 0.1
    open_s: float = 0.01
    suspend_s: float = 0.25
    step_s: float = 0.6
    patience_s: float = 0.1
    start_group_s: float = 2.0
    stop_s: float = 0.1


@dataclass(slots=True)
class SimJob:
    """A job's progress. `left_device_s`: remaining work; None for a job that never ends."""

    view: JobView
    left_device_s: float | None = None
    left_a_step: bool = False
    """Whether the last suspension abandoned a step. The first step after it is always finished."""


@dataclass(slots=True)
class _Group:
    devices: tuple[str, ...]
    run: str
    since_s: float
    timer: asyncio.TimerHandle | None = None
    ended: GroupEnded | None = None


class SimModel:
    """One model: its requests at the engines, and what is known of them."""

    def __init__(self, cluster: Cluster, deployment: DeploymentView):
        self.cluster, self._deployment = cluster, deployment
        self.standby: Standby | None = None

    def deployment(self, least: int = 0) -> DeploymentView:
        """least: replicas that are kept whatever the demand."""
        c, d = self.cluster, self._deployment
        demand = Demand(
            c.inflight_total,
            len(c.held),
            c.waiting_tokens,
            c.last_request_s,
            prompt_tokens=c.prompt_tokens,
        )
        return replace(d, demand=demand, standby=self.standby, min_replicas=max(d.min_replicas, least))


class SimStore:
    """The workload: jobs as they are submitted, and the models with their demand."""

    def __init__(self, models: dict[str, SimModel], policy: Policy, jobs: list[SimJob]):
        self._models, self.policy = models, policy
        self.warm_until_s = 0.0
        """Until then the store keeps one replica of each model, as if the trace followed earlier use."""
        self.jobs = {j.view.id: j for j in jobs}

    def load(self, *, free_devices: int) -> Workload:
        now_s = max(model.cluster.now_s for model in self._models.values())
        jobs = tuple(j.view for j in self.jobs.values() if j.view.submitted_s <= now_s)
        least = int(now_s < self.warm_until_s)
        return Workload(self.policy, jobs, tuple(model.deployment(least) for model in self._models.values()))

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None: ...

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None: ...

    def job_waiting(self, job_id: str, reason: str) -> None: ...

    def job_ended(self, job_id: str, outcome: str, error: str) -> None:
        self.jobs.pop(job_id, None)

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        assert trouble is None, f"simulated engines do not fail: {trouble}"

    def model_served(self, model: str, build: Build) -> None: ...

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        return False


class SimEffects:
    """The verbs in virtual time."""

    def __init__(
        self, models: dict[str, SimModel], devices: tuple[Device, ...], jobs: dict[str, SimJob], times: VerbTimes
    ):
        self._clusters = {name: model.cluster for name, model in models.items()}
        self._devices, self._jobs, self._times = devices, jobs, times
        self._replicas: dict[str, ReplicaView] = {}
        self._groups: dict[str, _Group] = {}
        self._changed = asyncio.Event()
        self.counted_s = (0.0, math.inf)
        """The time in which training counts."""
        self.trained: list[tuple[float, float, int]] = []
        """What counted: from, until, on how many devices."""

    @property
    def training_device_s(self) -> float:
        return sum((until_s - from_s) * devices for from_s, until_s, devices in self.trained)

    def _now(self) -> float:
        now_s = asyncio.get_running_loop().time()
        for cluster in self._clusters.values():
            cluster.advance(now_s)
        return now_s

    def _cluster(self, replica_id: str) -> Cluster:
        return self._clusters[self._replicas[replica_id].model]

    async def _take(self, seconds: float) -> None:
        self._now()
        await asyncio.sleep(seconds)
        self._now()

    async def start_replica(self, plan: ReplicaView) -> None:
        await self._take(self._times.start_s)
        self._replicas[plan.id] = ReplicaView(
            plan.id, plan.model, plan.version, "ready", plan.devices, settings=plan.settings
        )
        self._clusters[plan.model].start(plan.id)

    def _set(self, replica_id: str, state: ReplicaState) -> None:
        self._replicas[replica_id] = replace(self._replicas[replica_id], state=state)

    async def stop_replica(self, replica_id: str) -> None:
        await self._take(self._times.stop_s)
        if replica_id in self._replicas:
            self._cluster(replica_id).stop(replica_id)
            del self._replicas[replica_id]

    async def open_replica(self, replica_id: str) -> None:
        await self._take(self._times.open_s)
        self._set(replica_id, "open")
        self._cluster(replica_id).open(replica_id)

    async def drain_replica(self, replica_id: str) -> None:
        self._now()
        self._cluster(replica_id).close(replica_id)
        self._set(replica_id, "draining")
        while self._cluster(replica_id).inflight(replica_id):
            await self._take(REPORT_S)

    async def sleep_replica(self, replica_id: str) -> None:
        await self._take(self._times.sleep_s)
        self._set(replica_id, "asleep")

    async def wake_replica(self, replica_id: str, model: str, version: str) -> None:
        await self._take(self._times.wake_s)
        self._set(replica_id, "ready")

    async def swap_replica(self, replica_id: str, model: str, version: str) -> None:
        await self._take(self._times.wake_s)

    async def start_group(self, job_id: str, devices: tuple[str, ...], run: str) -> None:
        await self._take(self._times.start_group_s)
        now_s = self._now()
        group = self._groups[job_id] = _Group(devices, run, now_s)
        left = self._jobs[job_id].left_device_s
        if left is not None:
            wait_s = left / len(devices)
            group.timer = asyncio.get_running_loop().call_later(wait_s, self._finish, job_id)

    def _stop_training(self, job_id: str, lost_s: float = 0.0) -> None:
        """`lost_s`: how long the step under way had run when it was abandoned."""
        group = self._groups[job_id]
        if group.timer is not None:
            group.timer.cancel()
        now_s = self._now() - lost_s
        job = self._jobs[job_id]
        trained = (now_s - group.since_s) * len(group.devices)
        if job.left_device_s is not None:
            job.left_device_s = max(job.left_device_s - trained, 0.0)
        from_s, until_s = max(group.since_s, self.counted_s[0]), min(now_s, self.counted_s[1])
        if until_s > from_s:
            self.trained.append((from_s, until_s, len(group.devices)))
        group.since_s = now_s + lost_s

    def _finish(self, job_id: str) -> None:
        group = self._groups[job_id]
        self._stop_training(job_id)
        group.ended = GroupEnded("succeeded")
        self._changed.set()

    async def suspend_group(self, job_id: str) -> Detail:
        group = self._groups.get(job_id)
        if group is not None and group.ended is None:
            await self._end_step(job_id, group)
        await self._take(self._times.suspend_s)
        if group is not None and group.ended is not None:
            group.devices = ()
            return {"ended": group.ended.outcome}
        self._groups.pop(job_id, None)
        return None

    async def _end_step(self, job_id: str, group: _Group) -> None:
        """Finish the step under way or abandon it."""
        times, job = self._times, self._jobs[job_id]
        trained_s = self._now() - group.since_s
        into_s = trained_s % times.step_s
        first_again = job.left_a_step and trained_s < times.step_s
        job.left_a_step = not first_again and times.step_s - into_s > times.patience_s
        if not job.left_a_step:
            await self._take(times.step_s - into_s)
        if group.ended is None:
            self._stop_training(job_id, into_s if job.left_a_step else 0.0)

    async def stop_group(self, job_id: str) -> None:
        group = self._groups.get(job_id)
        if group is not None and group.ended is None:
            self._stop_training(job_id)
        await self._take(self._times.stop_s)
        self._groups.pop(job_id, None)

    def close_books(self) -> None:
        """Add what the running groups have trained so far to the totals."""
        for job_id, group in self._groups.items():
            if group.ended is None:
                self._stop_training(job_id)

    async def observe(self) -> Box:
        groups = (GroupView(job_id, g.devices, ended=g.ended, run=g.run) for job_id, g in self._groups.items())
        return Box.of(self._devices, self._replicas.values(), groups)

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()


def elastic_job(devices: int) -> SimJob:
    """A job that takes all devices it gets and never ends."""
    return SimJob(JobView("elastic", 1, devices))
