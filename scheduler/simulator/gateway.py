"""Simulates a gateway's load reports and what the scheduler learns from them, and samples data for the plot."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scheduler.autoscale import demand as demand_
from scheduler.autoscale.shadow import Seen
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Standby
from scheduler.loop.loop import SchedulerLoop
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.effects import REPORT_S, SimEffects, SimStore

QUIET_REPORTS = 20
"""While there are no requests, only one in this many reports is simulated."""


@dataclass
class Sample:
    """One point of the plot."""

    at_s: float
    inflight: int
    held: int
    serving_devices: int
    training_devices: int


@dataclass
class Gateway:
    """Reports load every `REPORT_S`. It nudges the loop when the demand needs another number of replicas, and when a
    request arrives after a pause: by then the planner has forgotten what it kept for the previous one.

    learner: None if the policy ignores demand (a fixed split); then nothing is reported between samples.
    """

    cluster: Cluster
    store: SimStore
    effects: SimEffects
    config: SchedulerConfig
    sample_every_s: float
    learner: StandbyLearner | None = None
    samples: list[Sample] = field(default_factory=list)
    passed: Callable[[float], None] = lambda now_s: None
    """Called with the time of every sample."""

    async def run(self, loop: SchedulerLoop, until_s: float, submissions_s: list[float]) -> None:
        aio = asyncio.get_running_loop()
        wanted, next_sample_s, submitted, asked_s = -1, 0.0, 0, 0.0
        while True:
            now_s = aio.time()
            self.cluster.advance(now_s)
            self.store.requests_seen(now_s)
            now_wanted = self._wanted(now_s)
            while submitted < len(submissions_s) and submissions_s[submitted] <= now_s:
                submitted, wanted = submitted + 1, -1
            last_s = self.cluster.last_request_s or 0.0
            if now_wanted != wanted or last_s - asked_s > self.config.give_back_after_s:
                wanted = now_wanted
                loop.nudge()
            asked_s = last_s
            if now_s >= next_sample_s:
                next_sample_s = now_s + self.sample_every_s
                self.passed(now_s)
                c, e = self.cluster, self.effects
                self.samples.append(Sample(now_s, c.inflight_total, len(c.held), e.serving_devices, e.training_devices))
            over = now_s >= until_s and not self.cluster.arrivals_left
            if over and not self.cluster.held and not self.cluster.inflight_total:
                return
            await asyncio.sleep(self._until_next_s(now_s, next_sample_s, over))

    def _wanted(self, now_s: float) -> int:
        deployment = self.store.deployment()
        if self.learner is not None:
            self.store.standby = self._learn(self.learner, deployment, now_s)
            if self.store.standby != deployment.standby:
                deployment = replace(deployment, standby=self.store.standby)
        wanted = demand_.wanted_now(deployment, now_s, self.config)
        wanted = max(wanted, demand_.by_rise(deployment, self.config))
        return max(wanted, deployment.standby.replicas) if deployment.standby else wanted

    def _learn(self, learner: StandbyLearner, deployment: DeploymentView, now_s: float) -> Standby:
        cluster, rate = self.cluster, deployment.prefill_tokens_per_s
        assert rate, "the engine model has a rate"
        prompts, came = cluster.requests.prompt, range(self._arrived, cluster.arrived)
        self._arrived = cluster.arrived
        seen = Seen(
            works_s=[prompts[n] / rate for n in came],
            asked=demand_.by_concurrency(deployment, self.config),
            late=self._found_late(now_s, learner.target_s, rate),
            awake=cluster.open_count,
        )
        return learner.seen(now_s, seen)

    def _found_late(self, now_s: float, target_s: float, rate: float) -> int:
        """Requests whose target passed since the last report without a first token, but for those whose prompt alone
        takes longer."""
        requests, first_s, late = self.cluster.requests, self.cluster.served.first_token_s, 0
        while self._judged < self.cluster.arrived:
            n, due_s = self._judged, requests.arrival_s[self._judged] + target_s
            if due_s >= now_s:
                break
            late += not 0 <= first_s[n] <= due_s and requests.prompt[n] <= target_s * rate
            self._judged += 1
        return late

    _arrived = 0
    _judged = 0

    def _until_next_s(self, now_s: float, next_sample_s: float, over: bool) -> float:
        """Time of the next report: a multiple of the interval, more than one if nothing can happen before."""
        busy = self.cluster.held or self.cluster.inflight_total
        if self.learner is None and not over:
            reports = (next_sample_s - now_s) / REPORT_S
        elif busy or over:
            reports = 1.0
        else:
            reports = min((self.cluster.next_arrival_s - now_s) / REPORT_S, QUIET_REPORTS)
        return REPORT_S * max(math.ceil(reports), 1)
