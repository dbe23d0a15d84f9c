"""How long a model that nobody asks stays awake: an operator's number is obeyed, the box's own are limits."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, Hysteresis, PlanInput, Policy
from scheduler.loop.explain import explain
from scheduler.plan.autoscaler import required
from scheduler.plan.plan import plan
from tests.unit.scheduler.fakes import box_of

CONFIG = SchedulerConfig()
LAST_S, LIMIT_S = 1000.0, 300.0
SWITCH_DEVICE_S = 2 * CONFIG.job_pause_s * 7
BUSY = DeploymentView("m", "v1", max_replicas=4, target_inflight=10, demand=Demand(inflight=30, last_request_s=LAST_S))


def asleep_after_s(model: DeploymentView) -> float:
    """Seconds after its last request at which no replica is asked for any more; looked at every second."""
    hysteresis, _ = required(model, Hysteresis(), LAST_S, CONFIG, switch_device_s=SWITCH_DEVICE_S)
    assert hysteresis.replicas == 3
    quiet = replace(model, demand=Demand(last_request_s=LAST_S))
    for second in range(2000):
        hysteresis, _ = required(quiet, hysteresis, LAST_S + second, CONFIG, switch_device_s=SWITCH_DEVICE_S)
        if not hysteresis.replicas:
            return second
    raise AssertionError("it never slept")


def test_an_operators_number_is_obeyed_while_others_want_the_devices() -> None:
    for own_s in (5.0, 60.0, 600.0, 1500.0):
        assert asleep_after_s(replace(BUSY, idle_sleep_s=own_s)) == own_s


def test_explain_says_until_when_an_idle_model_stays_awake() -> None:
    idle = replace(BUSY, idle_sleep_s=600.0, demand=Demand(last_request_s=LAST_S))
    plan_input = PlanInput(Policy("auto"), box_of(2), deployments=(idle,))
    now_s = LAST_S + 100.0
    allocation = plan(plan_input, now_s, CONFIG)
    told = explain((), allocation, plan_input, now_s)
    assert told["idle"] == {"m": "Stays awake for 500 s more without a request: its idle_sleep_s is 600 s."}
