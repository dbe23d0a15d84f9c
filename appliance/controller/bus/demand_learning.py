"""Learns from each model's traffic what to keep on standby. Fed by the gateways' reports.

A learner whose bounds or target have changed begins again, and so do all after a restart of the controller.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from appliance.gateway.core.table import BUCKETS_PER_DOUBLING
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView
from scheduler.plan import autoscaler
from scheduler.plan.autoscaler import Bounds, StandbyLearner

LOOK_S = 0.25
"""Minimum interval: reports come more often than there is something to learn."""
MOST_REPLICAS = 64
"""Largest standby that is learned: all numbers up to it are simulated, so its cost grows with its square."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one model: names, its own and those of the adapters on its engines. prefill_tokens_per_s, kv_tokens:
    of one replica, None where unknown."""

    names: tuple[str, ...] = ()
    prefill_tokens_per_s: float | None = None
    kv_tokens: int | None = None


class DemandLearning:
    """Adds to deployments the measured prefill rate and the learned standby.

    A model has neither while its rate is unknown or it has no target for the first token (so nothing defines late);
    the planner's own floor applies then.

    Args:
        arrivals: by name, the requests since the last call by bucket of their prompt tokens.
        devices: how many serving may have.
    """

    def __init__(
        self,
        traffic: Callable[[str], Traffic],
        arrivals: Callable[[], Mapping[str, Counter[int]]],
        config: SchedulerConfig,
        devices: int,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._traffic, self._arrivals, self._config = traffic, arrivals, config
        self._devices, self._now_s = devices, now_s
        self._learned: dict[str, StandbyLearner] = {}
        self._looked_s = now_s()

    def learned(self, deployments: tuple[DeploymentView, ...]) -> tuple[DeploymentView, ...]:
        """The deployments as the planner should see them."""
        now_s = self._now_s()
        passed_s, arrived = now_s - self._looked_s, None
        if passed_s >= LOOK_S:
            self._looked_s, arrived = now_s, self._arrivals()
            names = {d.model for d in deployments}
            self._learned = {name: known for name, known in self._learned.items() if name in names}
        return tuple(self._one(d, now_s, arrived) for d in deployments)

    def _one(
        self, deployment: DeploymentView, now_s: float, arrived: Mapping[str, Counter[int]] | None
    ) -> DeploymentView:
        """arrived: None learns nothing."""
        traffic = self._traffic(deployment.model)
        rate, target_s = traffic.prefill_tokens_per_s, deployment.ttft_target_s
        if not rate or not target_s or not deployment.max_replicas:
            self._learned.pop(deployment.model, None)
            return replace(deployment, kv_tokens=traffic.kv_tokens)
        deployment = replace(deployment, kv_tokens=traffic.kv_tokens, prefill_tokens_per_s=rate)
        replicas = self._devices // deployment.tensor_parallel  # with tensor parallelism one is several devices
        bounds = Bounds(replicas, deployment.floor_replicas, min(deployment.max_replicas, MOST_REPLICAS), target_s)
        learner = self._learned.get(deployment.model)
        if learner is None or learner.bounds != bounds:
            learner = self._learned[deployment.model] = StandbyLearner(self._config, bounds)
        if arrived is not None:
            works_s = [
                2 ** ((bucket - 0.5) / BUCKETS_PER_DOUBLING) / rate
                for name in traffic.names
                for bucket in arrived.get(name, Counter()).elements()
            ]
            learner.seen(now_s, works_s, autoscaler.load(deployment, self._config))
        return replace(deployment, standby=learner.best)
