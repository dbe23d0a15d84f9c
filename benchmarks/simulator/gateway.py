"""Simulates a gateway's load reports, and the scheduler's learning from these reports."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from benchmarks.simulator.effects import REPORT_S, SimStore
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView, Standby
from scheduler.loop.loop import SchedulerLoop
from scheduler.plan import autoscaler
from scheduler.plan.autoscaler import StandbyLearner

QUIET_REPORTS, QUIET_S = 20, 5.0
"""Without requests, only one of this many reports is simulated; without a learner, one per this many seconds."""


class Gateway:
    """Reports load every `REPORT_S`. It nudges the loop when the demand needs another number of replicas, and when a
    request arrives after a pause in which the planner has dropped the replicas. learner: None for a fixed split, which
    ignores demand; then it reports only every `QUIET_S`."""

    def __init__(self, store: SimStore, config: SchedulerConfig, learner: StandbyLearner | None):
        self._store, self._config, self._learner = store, config, learner
        self._arrived = 0

    def _wanted(self, now_s: float) -> int:
        """Process a load report; return the number of replicas that the planner would want now."""
        deployment = self._store.deployment()
        if self._learner is not None:
            self._store.standby = self._learn(self._learner, deployment, now_s)
            deployment = replace(deployment, standby=self._store.standby)
        wanted = autoscaler.wanted_now(deployment, now_s, self._config)
        return max(wanted, deployment.standby.replicas) if deployment.standby else wanted

    def _learn(self, learner: StandbyLearner, deployment: DeploymentView, now_s: float) -> Standby:
        cluster, rate = self._store.cluster, deployment.prefill_tokens_per_s
        assert rate, "the engine model has a rate"
        came, self._arrived = range(self._arrived, cluster.arrived), cluster.arrived
        works_s = [cluster.requests.prompt[n] / rate for n in came]
        return learner.seen(now_s, works_s, autoscaler.load(deployment, self._config))

    async def run(self, loop: SchedulerLoop, until_s: float) -> None:
        clock, cluster = asyncio.get_running_loop().time, self._store.cluster
        wanted, reported_s = -1, 0.0
        while True:
            now_s = clock()
            cluster.advance(now_s)
            now_wanted, last_s = self._wanted(now_s), cluster.last_request_s or 0.0
            if now_wanted != wanted or last_s - reported_s > self._config.give_back_after_s:
                wanted = now_wanted
                loop.nudge()
            reported_s = last_s
            over = now_s >= until_s and not cluster.arrivals_left
            busy = bool(cluster.inflight_total or cluster.held)
            if over and not busy:
                return
            await asyncio.sleep(self._until_next_s(now_s, until_s, over, busy))

    def _until_next_s(self, now_s: float, until_s: float, over: bool, busy: bool) -> float:
        """Return the seconds to the next report: one interval, or several if nothing can happen before."""
        if self._learner is None and not over:
            reports = min(QUIET_S, until_s - now_s) / REPORT_S
        elif busy or over:
            reports = 1.0
        else:
            reports = min((self._store.cluster.next_arrival_s - now_s) / REPORT_S, QUIET_REPORTS)
        return REPORT_S * max(math.ceil(reports), 1)
