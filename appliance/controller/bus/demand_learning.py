"""Learns from each model's traffic what to keep on standby. Fed by the gateways' reports.

What has been learned of standby is stored every minute, and read when a learner begins: a restarted controller goes on
with it, faded by the time between. A learner whose bounds or target have changed begins again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from appliance.controller.bus.load import Arrived
from appliance.gateway.observe.load import BUCKETS_PER_DOUBLING, SHORTEST_S
from appliance.store.database import Database
from appliance.store.records import standby as standby_rows
from appliance.store.rows import StandbyRow
from scheduler.autoscale import demand as demand_
from scheduler.autoscale.shadow import Seen, standby_costs
from scheduler.autoscale.standby import StandbyLearner
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Minimum interval: several gateways report more often than there is something to learn."""
HOPELESS_S = 30.0
"""Time constant within which a prompt that no replica computes in time is found late, or was computed sooner than the
measured rate says."""
SAVE_S = 60.0
"""How often what has been learned is stored: half an hour of memory does not change much in a minute."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one model and of the adapters on its engines. arrived: cumulative totals by name.
    prefill_tokens_per_s, kv_tokens: of one replica, None where unknown. awake: replicas that answer now."""

    arrived: Mapping[str, Arrived] = field(default_factory=dict)
    prefill_tokens_per_s: float | None = None
    awake: int = 0
    kv_tokens: int | None = None


class DemandLearning:
    """Adds to deployments the measured prefill rate and the learned standby.

    A model has neither of the latter two while its rate is unknown or it has no target for the first token (so nothing
    defines late); the planner's own floor applies then.
    """

    def __init__(
        self,
        traffic: Callable[[str], Traffic],
        config: SchedulerConfig,
        devices: int,
        now_s: Callable[[], float] = time.monotonic,
        db: Database | None = None,
        unix_s: Callable[[], float] = time.time,
    ):
        self._traffic, self._config, self._devices, self._now_s = traffic, config, devices, now_s
        self._db, self._unix_s = db, unix_s
        self._saved_s: dict[str, float] = {}
        self._learners: dict[str, tuple[tuple[float, ...], StandbyLearner]] = {}
        # For each name, which of its arrivals have been learned from.
        self._counted: dict[str, Arrived] = {}
        # For each model, the prompts too long for the target that have not been found late.
        self._hopeless: dict[str, float] = {}
        self._looked_s: float | None = None

    def learned(self, deployments: tuple[DeploymentView, ...]) -> tuple[DeploymentView, ...]:
        """The deployments as the planner should see them."""
        now_s = self._now_s()
        look = self._looked_s is None or now_s - self._looked_s >= LOOK_S
        if look:
            passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
            self._looked_s = now_s
            names = {d.model for d in deployments}
            self._learners = {name: kept for name, kept in self._learners.items() if name in names}
            self._saved_s = {name: kept for name, kept in self._saved_s.items() if name in names}
            fade = math.exp(-passed_s / HOPELESS_S)
            self._hopeless = {name: kept * fade for name, kept in self._hopeless.items() if name in names}
        traffic = {d.model: self._traffic(d.model) for d in deployments}
        if look:
            called = {name for one in traffic.values() for name in one.arrived}
            self._counted = {name: kept for name, kept in self._counted.items() if name in called}
        return tuple(self._one(d, traffic[d.model], now_s, look) for d in deployments)

    def _one(self, deployment: DeploymentView, traffic: Traffic, now_s: float, look: bool) -> DeploymentView:
        # Count arrivals even before learning is possible, or they would later count as one burst.
        new = self._new(traffic.arrived) if look else Arrived()
        deployment = replace(deployment, kv_tokens=traffic.kv_tokens)
        rate = traffic.prefill_tokens_per_s
        if not rate or not deployment.ttft_target_s or not deployment.max_replicas:
            self._learners.pop(deployment.model, None)
            return deployment
        deployment = replace(deployment, prefill_tokens_per_s=rate)
        learner = self._learner(deployment, deployment.ttft_target_s)
        if look:
            works_s = _works_s(new, rate)
            late = _found_late(new, deployment.ttft_target_s)
            hopeless = self._of_them_hopeless(deployment.model, late, deployment.ttft_target_s, works_s)
            load = demand_.load(deployment, self._config)
            seen = Seen(
                works_s=works_s,
                load=load,
                running=demand_.running(deployment, _running_part(deployment.demand, traffic.arrived), self._config),
                late=late - hopeless,
                hopeless=hopeless,
                awake=traffic.awake,
            )
            learner.seen(now_s, seen)
            self._save(deployment.model, now_s)
        return replace(deployment, standby=learner.best)

    def _of_them_hopeless(self, model: str, late: int, target_s: float, works_s: list[float]) -> int:
        """How many of the late requests have a prompt that no replica computes in time."""
        waiting = self._hopeless.get(model, 0.0) + sum(work_s > target_s for work_s in works_s)
        found = min(late, round(waiting))
        self._hopeless[model] = max(waiting - found, 0.0)
        return found

    def _learner(self, deployment: DeploymentView, target_s: float) -> StandbyLearner:
        """The deployment's learner; a new one when its parameters have changed."""
        # In replicas: with tensor parallelism one is several devices.
        replicas = self._devices // deployment.tensor_parallel
        settings = (deployment.floor_replicas, deployment.max_replicas, target_s, replicas)
        known = self._learners.get(deployment.model)
        if known is None or known[0] != settings:
            learner = StandbyLearner(
                standby_costs(self._config, replicas),
                least=deployment.floor_replicas,
                most=deployment.max_replicas,
                target_s=target_s,
                late_share=self._config.late_requests_share,
            )
            self._restore(deployment.model, learner, settings)
            known = self._learners[deployment.model] = (settings, learner)
        return known[1]

    def _restore(self, model: str, learner: StandbyLearner, arguments: tuple[float, ...]) -> None:
        row = standby_rows.find(self._db, model) if self._db else None
        if row is None or row.arguments != list(arguments):
            return
        try:
            learner.restore(row.state, self._now_s(), self._unix_s() - row.saved_s)
        except (LookupError, TypeError, ValueError) as error:
            # It is of another release: an hour of learning is not worth a box that does not start.
            log.warning("what was learned of the traffic of %s cannot be read, and is learned again: %r", model, error)

    def _save(self, model: str, now_s: float) -> None:
        if self._db is None or now_s - self._saved_s.setdefault(model, now_s) < SAVE_S:
            return
        self._saved_s[model] = now_s
        arguments, learner = self._learners[model]
        standby_rows.save(self._db, StandbyRow(model, self._unix_s(), list(arguments), learner.state()))

    def _new(self, arrived: Mapping[str, Arrived]) -> Arrived:
        """Arrivals since the last call."""
        new = Arrived()
        for name, total in arrived.items():
            new = new.plus(total.since(self._counted.get(name, Arrived())))
            self._counted[name] = total
        return new


def _works_s(new: Arrived, rate: float) -> list[float]:
    """Seconds that one replica needs for each new prompt. The buckets give the sizes, the sum of tokens their scale."""
    tokens = [
        2 ** ((bucket - 0.5) / BUCKETS_PER_DOUBLING) for bucket, number in new.prompts.items() for _ in range(number)
    ] or [1.0] * new.requests
    scale = new.prompt_tokens / (sum(tokens) * rate) if tokens else 0.0
    return [one * scale for one in tokens]


def _running_part(demand: Demand, arrived: Mapping[str, Arrived]) -> float:
    """Share of the requests in flight that have a first token: of the others the prompts' tokens are known."""
    requests = sum(one.requests for one in arrived.values())
    tokens = sum(one.prompt_tokens for one in arrived.values())
    if not demand.requests or not tokens:
        return 1.0
    return max(1 - demand.waiting_tokens / (tokens / requests) / demand.requests, 0.0)


def _found_late(new: Arrived, target_s: float) -> int:
    """Streams whose first token came after the target."""
    return sum(
        number
        for bucket, number in new.first_tokens.items()
        if SHORTEST_S * 2 ** ((bucket - 1) / BUCKETS_PER_DOUBLING) >= target_s
    )
