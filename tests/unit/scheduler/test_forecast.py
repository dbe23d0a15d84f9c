"""A rise in the number of requests is seen early, and chance is not taken for one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.autoscale import demand as demand_
from scheduler.autoscale.forecast import KNOWN_REQUESTS, LEAST_S, WINDOW_S, DemandForecast
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, Hysteresis

REPORT_S, AHEAD_S = 0.25, 4.0
CONFIG = SchedulerConfig()


class Life:
    """Poisson requests, each lasting about as long, and what is expected of them at every report."""

    def __init__(self, seed: int, lasts_s: float, inflight: int = 0):
        self.rng, self.forecast, self.lasts_s = random.Random(seed), DemandForecast(AHEAD_S), lasts_s
        self.arrived, self.now_s = 0, 0.0
        self.ends = [self.rng.expovariate(1 / lasts_s) for _ in range(inflight)]

    def live(self, seconds: float, per_s: float) -> list[tuple[int, float]]:
        """Requests in flight and those expected, at each report."""
        found, end_s = [], self.now_s + seconds
        next_s = self.now_s + self.rng.expovariate(per_s)
        while self.now_s < end_s:
            self.now_s += REPORT_S
            while next_s <= self.now_s:
                self.ends.append(next_s + self.rng.expovariate(1 / self.lasts_s))
                self.arrived, next_s = self.arrived + 1, next_s + self.rng.expovariate(per_s)
            self.ends = [end for end in self.ends if end > self.now_s]
            self.forecast.seen(self.now_s, len(self.ends), self.arrived)
            found.append((len(self.ends), self.forecast.expected))
        return found


@pytest.mark.parametrize("seed", range(3))
def test_chance_on_flat_load_is_hardly_ever_a_rise(seed: int) -> None:
    told = Life(seed, 4.0, inflight=48).live(600, 12.0)
    assert sum(expected > 0 for _, expected in told) < 0.05 * len(told)
    assert max(expected - now for now, expected in told) < 20, "and a small one then"


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_begin_to_come_are_seen_within_the_window(seed: int) -> None:
    now, expected = Life(seed, 10.0).live(WINDOW_S, 20.0)[-1]
    assert now + 8 * AHEAD_S < expected < now + 25 * AHEAD_S, "twenty came each second and few ended"


@pytest.mark.parametrize("seed", range(3))
def test_short_requests_are_not_expected_to_pile_up_once_it_is_known_that_they_are(seed: int) -> None:
    """Found on bursts that two replicas serve well: each was taken for the beginning of something larger."""
    life = Life(seed, 1.0)
    life.live(KNOWN_REQUESTS, 2.0)
    burst = life.live(20.0, 25.0)
    assert any(expected for _, expected in burst), "it rises"
    assert max(expected for _, expected in burst) < 60, "25 in flight are to be expected, by chance twice as many"


def test_nothing_is_told_of_a_fall_or_of_a_moment() -> None:
    forecast = DemandForecast(AHEAD_S)
    assert forecast.expected == 0.0
    forecast.seen(0.0, 0, 0)
    forecast.seen(LEAST_S / 2, 100, 100)
    assert forecast.expected == 0.0, "too short to tell"
    forecast.seen(WINDOW_S, 100, 100)
    assert forecast.expected > 0
    forecast.seen(2 * WINDOW_S, 10, 110)
    assert forecast.expected == 0.0


def test_one_hand_over_takes_what_the_next_would_have_to() -> None:
    """Found on a flat load that began beside one engine: hand-overs took one device after the other, each of them
    delayed by the job's restart of the one before, and 8 % of the first minute's requests were late."""
    model = DeploymentView("m", "v1", min_replicas=1, max_replicas=8, target_inflight=32)
    hysteresis = Hysteresis(replicas=1)

    def replicas(expected: float) -> int:
        demand = Demand(inflight=40, last_request_s=1000.0, expected=expected)
        return demand_.required(replace(model, demand=demand), hysteresis, 1000.0, CONFIG)[0].replicas

    assert replicas(0.0) == 2
    assert replicas(124.0) == 4, "32 are carried by each"
    assert replicas(1e6) == 8, "never more than may be"
