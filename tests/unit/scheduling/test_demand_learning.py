"""What gateways report becomes standby in the planner's view of the deployments."""

from __future__ import annotations

from collections import Counter

import pytest

from appliance.controller.engines.routing_table import Traffic
from appliance.controller.scheduling.state_store import LOOK_S, DemandLearning
from appliance.gateway.core.table import bucket
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import DeploymentView

RATE, PROMPT_TOKENS = 1000.0, 50  # 0.05 replica-seconds
BEGAN_S = 1000.0
MODEL = DeploymentView("m", "v1", max_replicas=8, ttft_target_s=2.0)


class Box:
    """The gateway, the learner, and a clock."""

    def __init__(self) -> None:
        self.now_s, self.traffic, self.model = BEGAN_S, Traffic(("m", "adapter"), RATE), MODEL
        self.arrived = 0
        self.learning = DemandLearning(
            lambda model: self.traffic, self.take_arrivals, SchedulerConfig(), 8, lambda: self.now_s
        )

    def take_arrivals(self) -> dict[str, Counter[int]]:
        return {"m": Counter({bucket(PROMPT_TOKENS, 1.0): self.arrived})}

    def live(self, minutes: float, work_per_s) -> DeploymentView:
        """Requests at this rate of work (replica-seconds per second)."""
        due, end_s = 0.0, self.now_s + minutes * 60
        while self.now_s < end_s:
            self.now_s += LOOK_S
            due += work_per_s(self.now_s) * LOOK_S * RATE / PROMPT_TOKENS
            self.arrived, due = int(due), due % 1
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


def test_learned_standby_of_an_unlimited_model_simulates_few_numbers():
    box = Box()
    box.model = DeploymentView("m", "v1", max_replicas=65536, ttft_target_s=2.0)
    box.live(0.1, lambda now_s: 0.1)
    assert len(box.learning._learners["m"]._shadows) < 200
