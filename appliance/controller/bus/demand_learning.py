"""Learns from each model's traffic what to keep on standby. Fed by the gateways' reports.

A learner whose bounds or target have changed begins again, and so do all after a restart of the controller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from appliance.controller.bus.load import Arrived
from appliance.gateway.core.load import BUCKETS_PER_DOUBLING, SHORTEST_S
from scheduler.autoscale import demand as demand_
from scheduler.autoscale.shadow import Seen, standby_costs
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView

LOOK_S = 0.25
"""Minimum interval: several gateways report more often than there is something to learn."""
HOPELESS_S = 30.0
"""Time constant within which a prompt that no replica computes in time is found late, or was computed sooner than the
measured rate says."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one model: names, its own and those of the adapters on its engines. prefill_tokens_per_s, kv_tokens:
    of one replica, None where unknown. awake: replicas that answer now. prompt_tokens: of all requests in flight and
    held."""

    names: tuple[str, ...] = ()
    prefill_tokens_per_s: float | None = None
    awake: int = 0
    kv_tokens: int | None = None
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Learned:
    """settings: the learner's arguments. hopeless: prompts too long for the target that were not found late yet."""

    settings: tuple[float, ...]
    learner: StandbyLearner
    hopeless: float = 0.0


class DemandLearning:
    """Adds to deployments the measured prefill rate and the learned standby.

    A model has neither while its rate is unknown or it has no target for the first token (so nothing defines late);
    the planner's own floor applies then.
    """

    def __init__(
        self,
        traffic: Callable[[str], Traffic],
        arrivals: Callable[[], Mapping[str, Arrived]],
        config: SchedulerConfig,
        devices: int,
        now_s: Callable[[], float] = time.monotonic,
    ):
        """arrivals: by name, since the last call."""
        self._traffic, self._arrivals, self._config = traffic, arrivals, config
        self._devices, self._now_s = devices, now_s
        self._learned: dict[str, _Learned] = {}
        self._looked_s = now_s()

    def learned(self, deployments: tuple[DeploymentView, ...]) -> tuple[DeploymentView, ...]:
        """The deployments as the planner should see them."""
        now_s = self._now_s()
        passed_s = now_s - self._looked_s
        arrived: Mapping[str, Arrived] | None = None
        if passed_s >= LOOK_S:
            self._looked_s, arrived = now_s, self._arrivals()
            names = {d.model for d in deployments}
            self._learned = {name: kept for name, kept in self._learned.items() if name in names}
            for kept in self._learned.values():
                kept.hopeless *= math.exp(-passed_s / HOPELESS_S)
        return tuple(self._one(d, now_s, arrived) for d in deployments)

    def _one(self, deployment: DeploymentView, now_s: float, arrived: Mapping[str, Arrived] | None) -> DeploymentView:
        """arrived: None learns nothing."""
        traffic = self._traffic(deployment.model)
        deployment = replace(deployment, kv_tokens=traffic.kv_tokens)
        rate, target_s = traffic.prefill_tokens_per_s, deployment.ttft_target_s
        if not rate or not target_s or not deployment.max_replicas:
            self._learned.pop(deployment.model, None)
            return deployment
        deployment = replace(deployment, prefill_tokens_per_s=rate)
        kept = self._kept(deployment, target_s)
        if arrived is not None:
            new = Arrived()
            for name in traffic.names:
                new = new.plus(arrived.get(name, Arrived()))
            works_s, late = _works_s(new, rate), _found_late(new, target_s)
            kept.hopeless += sum(work_s > target_s for work_s in works_s)
            hopeless = min(late, round(kept.hopeless))
            kept.hopeless = max(kept.hopeless - hopeless, 0.0)
            waiting = deployment.demand.waiting_tokens / traffic.prompt_tokens if traffic.prompt_tokens else 0.0
            seen = Seen(
                works_s=works_s,
                load=demand_.load(deployment, self._config),
                running=demand_.running(deployment, max(1 - waiting, 0.0), self._config),
                late=late - hopeless,
                hopeless=hopeless,
                awake=traffic.awake,
            )
            kept.learner.seen(now_s, seen)
        return replace(deployment, standby=kept.learner.best)

    def _kept(self, deployment: DeploymentView, target_s: float) -> _Learned:
        """With a new learner where its arguments have changed."""
        replicas = self._devices // deployment.tensor_parallel  # with tensor parallelism one is several devices
        settings = (deployment.floor_replicas, deployment.max_replicas, target_s, replicas)
        kept = self._learned.get(deployment.model)
        if kept is None or kept.settings != settings:
            learner = StandbyLearner(
                standby_costs(self._config, replicas),
                least=deployment.floor_replicas,
                most=deployment.max_replicas,
                target_s=target_s,
                late_share=self._config.late_requests_share,
            )
            kept = self._learned[deployment.model] = _Learned(settings, learner)
        return kept


def _works_s(new: Arrived, rate: float) -> list[float]:
    """Seconds that one replica needs for each new prompt. The buckets give the sizes, the sum of tokens their scale."""
    tokens = [
        2 ** ((bucket - 0.5) / BUCKETS_PER_DOUBLING) for bucket, number in new.prompts.items() for _ in range(number)
    ] or [1.0] * new.requests
    scale = new.prompt_tokens / (sum(tokens) * rate) if tokens else 0.0
    return [one * scale for one in tokens]


def _found_late(new: Arrived, target_s: float) -> int:
    """Streams whose first token came after the target."""
    return sum(
        number
        for bucket, number in new.first_tokens.items()
        if SHORTEST_S * 2 ** ((bucket - 1) / BUCKETS_PER_DOUBLING) >= target_s
    )
