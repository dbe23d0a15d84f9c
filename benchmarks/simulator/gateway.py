"""Simulates a gateway's load reports and what the scheduler learns from them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from benchmarks.simulator.effects import REPORT_S, SimModel
from scheduler.autoscale import demand as demand_
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Standby
from scheduler.loop.loop import SchedulerLoop

QUIET_REPORTS, QUIET_S = 20, 5.0
"""While there are no requests, one in so many reports is simulated; where nobody listens, one in so many seconds."""


@dataclass
class Reports:
    """Reports of one model's load. learner: None if the policy learns nothing from it (a fixed split)."""

    model: SimModel
    config: SchedulerConfig
    learner: StandbyLearner | None = None
    _arrived = 0

    def wanted(self, now_s: float) -> int:
        """Takes a report, and returns the replicas that the planner would want now."""
        deployment = self.model.deployment()
        if self.learner is not None:
            self.model.standby = self._learn(self.learner, deployment, now_s)
            if self.model.standby != deployment.standby:
                deployment = replace(deployment, standby=self.model.standby)
        wanted = demand_.wanted_now(deployment, now_s, self.config)
        return max(wanted, deployment.standby.replicas) if deployment.standby else wanted

    def _learn(self, learner: StandbyLearner, deployment: DeploymentView, now_s: float) -> Standby:
        cluster, rate = self.model.cluster, deployment.prefill_tokens_per_s
        assert rate, "the engine model has a rate"
        came, self._arrived = range(self._arrived, cluster.arrived), cluster.arrived
        works_s = [cluster.requests.prompt[n] / rate for n in came]
        return learner.seen(now_s, works_s, demand_.load(deployment, self.config))


@dataclass
class Gateway:
    """Reports load every `REPORT_S`. It nudges the loop when the demand needs another number of replicas, and when a
    request arrives after a pause: by then the planner has forgotten what it kept for the previous one.

    listens: False if the policy ignores demand (a fixed split of one model); then nothing is reported.
    """

    reports: list[Reports]
    config: SchedulerConfig
    listens: bool

    async def run(self, loop: SchedulerLoop, until_s: float, submissions_s: list[float]) -> None:
        aio = asyncio.get_running_loop()
        clusters = [one.model.cluster for one in self.reports]
        wanted: list[int] = []
        asked_s = [0.0] * len(clusters)
        submitted = 0
        while True:
            now_s = aio.time()
            for cluster in clusters:
                cluster.advance(now_s)
            now_wanted = [one.wanted(now_s) for one in self.reports]
            while submitted < len(submissions_s) and submissions_s[submitted] <= now_s:
                submitted, wanted = submitted + 1, []
            last_s = [cluster.last_request_s or 0.0 for cluster in clusters]
            pause_s = max(last - asked for last, asked in zip(last_s, asked_s, strict=True))
            if now_wanted != wanted or pause_s > self.config.give_back_after_s:
                wanted = now_wanted
                loop.nudge()
            asked_s = last_s
            over = now_s >= until_s and not any(cluster.arrivals_left for cluster in clusters)
            busy = any(cluster.inflight_total or cluster.held for cluster in clusters)
            if over and not busy:
                return
            await asyncio.sleep(self._until_next_s(now_s, until_s, over, busy))

    def _until_next_s(self, now_s: float, until_s: float, over: bool, busy: bool) -> float:
        """Time of the next report: a multiple of the interval, more than one if nothing can happen before."""
        if not self.listens and not over:
            reports = min(QUIET_S, until_s - now_s) / REPORT_S
        elif busy or over:
            reports = 1.0
        else:
            next_s = min(one.model.cluster.next_arrival_s for one in self.reports)
            reports = min((next_s - now_s) / REPORT_S, QUIET_REPORTS)
        return REPORT_S * max(math.ceil(reports), 1)
