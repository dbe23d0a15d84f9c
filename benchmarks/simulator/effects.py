"""Simulated effects and store, on which the scheduler's real loop moves the engines of one model and one job.

The job uses all devices it gets and never ends. This module decides nothing: verbs take the times of `VerbTimes` and
act on the `Cluster` (requests) and the group (training).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from benchmarks.simulator.cluster import Cluster
from scheduler.core.failures import Failure
from scheduler.core.workload import (
    Build,
    Demand,
    DeploymentView,
    Device,
    JobView,
    Policy,
    ReplicaState,
    ReplicaView,
    Standby,
    Workload,
)
from scheduler.handover.effects import Box, Detail, GroupView

MODEL, JOB = "model", "elastic"
REPORT_S = 0.25
"""Interval of the load reports of a gateway."""


@dataclass(frozen=True, slots=True)
class VerbTimes:
    """Seconds that verbs take. Defaults: a 7 B model in bf16 (13.5 GB) on an H100 behind PCIe 5 (50 GB/s one way).

    wake: copy the weights once over PCIe, plus half a second. start: fork, then as wake. suspend: copy 12 bytes per
    parameter of optimizer state over eight links. start_group: fork the ranks and load the state back. step: one
    training step. A suspension aborts the step in progress, which is repeated later (see train.trainer.train), unless
    it ends within `patience_s` or is itself a repetition.
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


class SimStore:
    """The workload of one job, and one model with its demand. warm_until_s: one replica stays awake until then, as if
    the model had been used before the trace."""

    def __init__(self, cluster: Cluster, deployment: DeploymentView, policy: Policy, devices: int, warm_until_s: float):
        self.cluster, self._deployment, self._warm_until_s = cluster, deployment, warm_until_s
        self.policy, self._job = policy, JobView(JOB, tuple(range(1, devices + 1)))
        self.standby: Standby | None = None

    def deployment(self) -> DeploymentView:
        c, d = self.cluster, self._deployment
        demand = Demand(
            c.inflight_total, len(c.held), c.waiting_tokens, c.last_request_s, prompt_tokens=c.prompt_tokens
        )
        least = max(d.min_replicas, int(c.now_s < self._warm_until_s))
        return replace(d, demand=demand, standby=self.standby, min_replicas=least)

    def load(self, *, free_devices: int) -> Workload:
        return Workload(self.policy, (self._job,), (self.deployment(),))

    def job_running(self, job_id: str, devices: tuple[str, ...]) -> None: ...

    def job_coming(self, job_id: str, devices: tuple[str, ...], answering: int) -> None: ...

    def job_waiting(self, job_id: str, reason: str) -> None: ...

    def job_ended(self, job_id: str, outcome: str, error: str) -> None:
        raise AssertionError(f"the simulated job does not end: {outcome}, {error}")

    def model_trouble(self, model: str, trouble: Failure | None) -> None:
        assert trouble is None, f"simulated engines do not fail: {trouble}"

    def model_served(self, model: str, build: Build) -> None: ...

    def settings_failed(self, model: str, failed: Build, served: Build, reason: str) -> bool:
        return False


class SimEffects:
    """The verbs in virtual time. trained: (from, until, number of devices)."""

    def __init__(self, cluster: Cluster, devices: tuple[Device, ...], times: VerbTimes):
        self._cluster, self._devices, self._times = cluster, devices, times
        self._replicas: dict[str, ReplicaView] = {}
        self._group: GroupView | None = None
        self._since_s = 0.0
        self._left_a_step = False  # whether the last suspension aborted a step, whose repetition is never aborted
        self.trained: list[tuple[float, float, int]] = []

    def _now(self) -> float:
        now_s = asyncio.get_running_loop().time()
        self._cluster.advance(now_s)
        return now_s

    async def _take(self, seconds: float) -> None:
        self._now()
        await asyncio.sleep(seconds)
        self._now()

    async def start_replica(self, plan: ReplicaView) -> None:
        await self._take(self._times.start_s)
        self._replicas[plan.id] = ReplicaView(
            plan.id, plan.model, plan.version, "ready", plan.devices, settings=plan.settings
        )
        self._cluster.start(plan.id)

    def _set(self, replica_id: str, state: ReplicaState) -> None:
        self._replicas[replica_id] = replace(self._replicas[replica_id], state=state)

    async def stop_replica(self, replica_id: str) -> None:
        await self._take(self._times.stop_s)
        if replica_id in self._replicas:
            self._cluster.stop(replica_id)
            del self._replicas[replica_id]

    async def open_replica(self, replica_id: str) -> None:
        await self._take(self._times.open_s)
        self._set(replica_id, "open")
        self._cluster.open(replica_id)

    async def drain_replica(self, replica_id: str) -> None:
        self._now()
        self._cluster.close(replica_id)
        self._set(replica_id, "draining")
        while self._cluster.inflight(replica_id):
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
        self._group, self._since_s = GroupView(job_id, devices, run=run), self._now()

    async def suspend_group(self, job_id: str) -> Detail:
        if self._group is not None:
            await self._end_step()
        await self._take(self._times.suspend_s)
        self._group = None
        return None

    async def _end_step(self) -> None:
        """Finish or abort the step in progress."""
        trained_s, times = self._now() - self._since_s, self._times
        into_s = trained_s % times.step_s
        is_repeat = self._left_a_step and trained_s < times.step_s
        self._left_a_step = not is_repeat and times.step_s - into_s > times.patience_s
        if not self._left_a_step:
            await self._take(times.step_s - into_s)
        self.close_books(into_s if self._left_a_step else 0.0)

    async def stop_group(self, job_id: str) -> None:
        self.close_books()
        await self._take(self._times.stop_s)
        self._group = None

    def close_books(self, lost_s: float = 0.0) -> None:
        """Record the group's training so far. lost_s: seconds that an aborted step ran."""
        now_s = self._now()
        if self._group is not None:
            self.trained.append((self._since_s, now_s - lost_s, len(self._group.devices)))
            self._since_s = now_s

    async def observe(self) -> Box:
        return Box.of(self._devices, self._replicas.values(), [self._group] if self._group else [])

    async def changed(self) -> None:
        await asyncio.Event().wait()  # no simulated process ends by itself
