"""What is learned about standby replicas: enough for the target, no dearer than needed, and from the past alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, Hysteresis, Standby
from scheduler.plan import autoscaler
from scheduler.plan.autoscaler import Bounds, StandbyLearner

CONFIG = SchedulerConfig()
LOOK_S = 0.25


def poisson(rng: random.Random, mean: float) -> int:
    count, product = 0, rng.random()
    while product > math.exp(-mean):
        count, product = count + 1, product * rng.random()
    return count


def lived(
    work_per_s: Callable[[float], float], minutes: float, seed: int = 0, *, late_share: float = 0.01
) -> list[Standby]:
    """Requests of 0.05 replica-seconds each, at this rate of work; the choice after every minute."""
    config = CONFIG.model_copy(update={"late_requests_share": late_share})
    found = StandbyLearner(config, Bounds(8, 1, 8, 2.0))
    rng, chosen = random.Random(seed), []
    for look in range(int(minutes * 60 / LOOK_S)):
        now_s = look * LOOK_S
        requests = poisson(rng, work_per_s(now_s) * LOOK_S / 0.05)
        best = found.seen(now_s, [0.05] * requests)
        if look % int(60 / LOOK_S) == 0:
            chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_flat_load_gets_what_it_needs_and_no_more(seed: int) -> None:
    chosen = lived(lambda t: 2.4, 15, seed)
    assert {c.replicas for c in chosen[5:]} <= {3, 4}, "2.4 devices of work: two would drown, five idle"


def test_bursts_too_quick_to_react_to_are_met_on_standby() -> None:
    def bursts(t: float) -> float:
        return 8.0 if t % 60 < 2 else 0.1

    chosen = lived(bursts, 20)
    assert all(c.replicas >= 4 for c in chosen[5:]), "16 replica-seconds within two seconds, due in two more"
    lenient = lived(bursts, 20, late_share=0.9)
    assert lenient[-1].replicas < chosen[-1].replicas, "where they may be late, training has the devices"


def test_time_per_token_above_its_target_asks_for_more() -> None:
    model = DeploymentView(
        "m",
        "v1",
        max_replicas=8,
        target_inflight=10,
        tpot_target_s=0.05,
        demand=Demand(inflight=20, last_request_s=9.0, tpot_p95_s=0.04),
    )

    def at(tpot_p95_s: float | None) -> int:
        return autoscaler.wanted_now(replace(model, demand=replace(model.demand, tpot_p95_s=tpot_p95_s)), 10.0, CONFIG)

    assert at(None) == at(0.04) == at(0.05) == 2
    assert at(0.07) == 3 and at(0.1) == 4
    assert at(10.0) == 4, "no more than twice as many by one look"
    assert autoscaler.wanted_now(replace(model, tpot_target_s=None), 10.0, CONFIG) == 2


def test_standby_is_kept_while_the_model_is_in_use_and_no_longer() -> None:
    model = DeploymentView(
        "m", "v1", max_replicas=8, target_inflight=10, standby=Standby(3), demand=Demand(1, last_request_s=1000.0)
    )
    hysteresis, _ = autoscaler.required(model, Hysteresis(), 1000.0, CONFIG)
    assert hysteresis.replicas == 3
    quiet = replace(model, demand=Demand(0, last_request_s=1000.0))
    hysteresis, _ = autoscaler.required(quiet, hysteresis, 1000.0 + CONFIG.give_back_at_latest_s - 1, CONFIG)
    assert hysteresis.replicas == 3
    for after_s in (1, 12, 40):
        hysteresis, _ = autoscaler.required(quiet, hysteresis, 1000.0 + CONFIG.give_back_at_latest_s + after_s, CONFIG)
    assert hysteresis.replicas == 0
