"""What gateways report becomes standby in the planner's view of the deployments."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from appliance.controller.bus.demand_learning import LOOK_S, DemandLearning, Traffic
from appliance.controller.bus.load import Arrivals, ModelLoad, Report
from appliance.gateway.core.load import bucket
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView

RATE, PROMPT_TOKENS = 1000.0, 50  # 0.05 replica-seconds
BEGAN_S = 1000.0
MODEL = DeploymentView("m", "v1", max_replicas=8, ttft_target_s=2.0)


def said(requests: int, *, by: str = "g-0", started_s: float = BEGAN_S + 1, model: str = "m") -> Report:
    row = ModelLoad(arrived_prompts={bucket(PROMPT_TOKENS, 1.0): requests})
    return Report(by, 1, models={model: row}, started_s=started_s)


def counted(*reports: Report) -> int:
    arrivals = Arrivals(BEGAN_S)
    for report in reports:
        arrivals.add(report)
    return arrivals.take()["m"].total()


def test_arrivals_two_workers_add_up_and_repeated_reports_do_not():
    assert counted(said(3), said(4, by="g-1"), said(3), said(5), said(4, by="g-1")) == 9


@pytest.mark.parametrize("restarted", [2, 7, 12])
def test_arrivals_restarted_worker_counts_from_zero(restarted):
    assert counted(said(7), said(restarted, started_s=BEGAN_S + 50)) == 7 + restarted


class Box:
    """Two gateway workers, the learner, and a clock."""

    def __init__(self) -> None:
        self.now_s, self.traffic, self.model = BEGAN_S, Traffic(("m", "adapter"), RATE), MODEL
        self.arrivals = Arrivals(BEGAN_S)
        self.learning = DemandLearning(
            lambda model: self.traffic, self.arrivals.take, SchedulerConfig(), 8, lambda: self.now_s
        )
        self._workers = [SimpleNamespace(count=0, began_s=BEGAN_S + 1) for _ in range(2)]

    def live(self, minutes: float, work_per_s, restart_every_s: float = math.inf) -> DeploymentView:
        """Requests at this rate of work (replica-seconds per second), shared out over the workers."""
        rng, due, end_s, restart_s = random.Random(3), 0.0, self.now_s + minutes * 60, self.now_s
        while self.now_s < end_s:
            self.now_s += LOOK_S
            due += work_per_s(self.now_s) * LOOK_S * RATE / PROMPT_TOKENS
            if self.now_s - restart_s >= restart_every_s:
                restart_s, self._workers[0] = self.now_s, SimpleNamespace(count=0, began_s=self.now_s)
            came, due = int(due), due % 1
            first = rng.randint(0, came)
            for number, (worker, count) in enumerate(zip(self._workers, (first, came - first), strict=True)):
                worker.count += count
                self.arrivals.add(said(worker.count, by=f"g-{number}", started_s=worker.began_s))
            seen = self.seen()
        return seen

    def seen(self) -> DeploymentView:
        return self.learning.learned((self.model,))[0]


@pytest.fixture
def box() -> Box:
    return Box()


def flat(t: float) -> float:
    return 0.3


def bursts(t: float) -> float:
    return 8.0 if t % 60 < 2 else 0.1


def test_learned_bursts_raise_standby_and_flat_load_keeps_it_low(box):
    quiet = box.live(2, flat)
    assert quiet.prefill_tokens_per_s == RATE and quiet.standby.replicas <= 2
    assert box.live(10, bursts).standby.replicas >= 4
    box.model = DeploymentView("m", "v1", max_replicas=2, ttft_target_s=2.0)
    assert box.seen().standby.replicas <= 2, "with other bounds a new learner"


def test_learned_without_rate_or_target_has_no_standby(box):
    box.traffic = Traffic(("m",), None)
    unknown = box.live(1, lambda t: 3.0)
    assert unknown.standby is None and unknown.prefill_tokens_per_s is None
    box.traffic = Traffic(("m",), RATE)
    assert box.live(1, flat).standby.replicas <= 2, "what came before the rate was known is no burst"
    box.model = DeploymentView("m", "v1", max_replicas=8)
    assert box.seen().standby is None
