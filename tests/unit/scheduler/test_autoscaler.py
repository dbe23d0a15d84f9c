"""The autoscaler derives the number of awake replicas and their idle time from traffic and latency targets."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import (
    Demand,
    DeploymentView,
    Device,
    Hysteresis,
    JobView,
    PlanInput,
    Policy,
    ReplicaView,
    Standby,
)
from scheduler.plan import autoscaler
from scheduler.plan.autoscaler import Bounds, StandbyLearner, required
from scheduler.plan.plan import Round

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
    """Simulate `work_per_s(now_s)` in requests of 0.05 replica-seconds; return the standby chosen each minute."""
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
def test_autoscaler_flat_load_gets_3_to_4_replicas(seed: int) -> None:
    chosen = lived(lambda t: 2.4, 15, seed)
    assert {c.replicas for c in chosen[5:]} <= {3, 4}, "2.4 devices of work: two would drown, five idle"


def test_autoscaler_short_bursts_raise_standby() -> None:
    def bursts(t: float) -> float:
        return 8.0 if t % 60 < 2 else 0.1

    chosen = lived(bursts, 20)
    assert all(c.replicas >= 4 for c in chosen[5:]), "16 replica-seconds within two seconds, due in two more"
    lenient = lived(bursts, 20, late_share=0.9)
    assert lenient[-1].replicas < chosen[-1].replicas, "where they may be late, training has the devices"


def test_autoscaler_tpot_above_target_adds_replicas() -> None:
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


MODEL = DeploymentView("m", "v1", min_replicas=1, max_replicas=8, target_inflight=10)


def test_autoscaler_load_counts_kv_cache_of_long_prompts() -> None:
    long = replace(MODEL, kv_tokens=100_000, demand=Demand(inflight=4, prompt_tokens=250_000, waiting_tokens=50_000))
    assert autoscaler.load(long, CONFIG) == 2.0
    assert autoscaler.wanted_now(long, 0.0, CONFIG) == 2
    short = replace(long, demand=replace(long.demand, prompt_tokens=2_000, waiting_tokens=0))
    assert autoscaler.load(short, CONFIG) == 0.4
    assert autoscaler.load(replace(long, kv_tokens=None), CONFIG) == 0.4, "by their number where nobody knows the cache"


def test_slots_order_models_without_replica_by_waiting_time_then_name() -> None:
    now_s, asked = 1000.0, Demand(inflight=1)

    def model(name: str, **changes: Any) -> DeploymentView:
        return replace(MODEL, model=name, max_replicas=2, **{"demand": asked, **changes})

    models = [
        model("least"),
        model("new"),
        model("idle", demand=Demand()),
        model("open_idle", demand=Demand()),
        model("over"),
        model("waits"),
        model("turn"),
        model("pinned", pinned=True),
    ]
    since_s = {"turn": now_s - 5, "over": now_s - CONFIG.turn_s, "open_idle": now_s - 5}
    opened = [ReplicaView(name, name, "v1", "open", (name,), at_s) for name, at_s in since_s.items()]
    hysteresis = {d.model: Hysteresis(replicas=1) for d in models}
    hysteresis["waits"] = Hysteresis(replicas=1, waiting_since_s=now_s - CONFIG.turn_s)
    hysteresis["new"] = Hysteresis(replicas=2, waiting_since_s=now_s - 2)
    hysteresis["least"] = Hysteresis(replicas=1, waiting_since_s=now_s - 1)
    slots = autoscaler.slots(models, opened, hysteresis, now_s, CONFIG)
    first = ["pinned", "turn", "waits", "over", "new", "least", "open_idle", "idle"]
    assert [slot.model for slot in slots if slot.wanted] == [*first, "new"]
    assert [slot.model for slot in slots if not slot.wanted] == ["pinned", *sorted({*first} - {"pinned", "new"})]


LAST_S, LIMIT_S = 1000.0, 300.0
SWITCH_DEVICE_S = 2 * CONFIG.job_pause_s * 7
BUSY = DeploymentView("m", "v1", max_replicas=4, target_inflight=10, demand=Demand(inflight=30, last_request_s=LAST_S))


def asleep_after_s(model: DeploymentView) -> float:
    """Return the whole seconds from the last request until the autoscaler requires no replica."""
    hysteresis, _ = required(model, Hysteresis(), LAST_S, CONFIG, switch_device_s=SWITCH_DEVICE_S)
    assert hysteresis.replicas == 3
    quiet = replace(model, demand=Demand(last_request_s=LAST_S))
    for second in range(2000):
        hysteresis, _ = required(quiet, hysteresis, LAST_S + second, CONFIG, switch_device_s=SWITCH_DEVICE_S)
        if not hysteresis.replicas:
            return second
    raise AssertionError("it never slept")


def test_autoscaler_obeys_configured_idle_sleep() -> None:
    for own_s in (5.0, 60.0, 600.0, 1500.0):
        assert asleep_after_s(replace(BUSY, idle_sleep_s=own_s)) == own_s


def held_for_s(pause_s: float | None) -> float:
    """Return for how many seconds `auto` keeps idle serving devices before it gives them to a job on six devices."""
    devices = tuple(Device(f"n0/{i}", "n0", i, "cuda") for i in range(8))
    job = JobView("j", tuple(range(1, 9)), phase="running", devices=tuple(d.id for d in devices[2:]), pause_s=pause_s)
    model = DeploymentView("m", "v1", max_replicas=8, target_inflight=10, demand=Demand(5, last_request_s=1000.0))
    replicas = tuple(ReplicaView(f"r{i}", "m", "v1", "open", (devices[i].id,)) for i in range(2))
    hysteresis = {"m": Hysteresis(replicas=2)}
    for now_s in range(1000, 1400):
        seen = replace(model, demand=Demand(5, last_request_s=float(now_s)))
        plan_input = PlanInput(Policy("auto"), devices, (job,), (seen,), replicas, hysteresis=hysteresis)
        hysteresis = Round(plan_input, float(now_s), CONFIG).hysteresis
        if hysteresis["m"].replicas < 2:
            return now_s - 1000.0
    return 400.0


def test_time_that_autoscaler_keeps_spare_devices_follows_job_pause() -> None:
    assert held_for_s(None) == pytest.approx(2 * CONFIG.job_pause_s * 6, abs=1.5)
    assert held_for_s(1.0) == pytest.approx(12.0, abs=1.5)
    assert held_for_s(20.0) == pytest.approx(240.0, abs=1.5)
