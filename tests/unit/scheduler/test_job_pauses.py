"""What a change of size costs a job is what its own changes took, and decides how long spare devices are held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device
from scheduler.core.workload import Demand, DeploymentView, Hysteresis, JobView, PlanInput, Policy, ReplicaView
from scheduler.plan.plan import Round

CONFIG = SchedulerConfig()


def held_for_s(pause_s: float | None) -> float:
    """How long devices that serving no longer needs are held under `auto`, beside a job of six devices."""
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


def test_spare_devices_are_held_for_what_the_running_job_really_pays() -> None:
    assert held_for_s(None) == pytest.approx(2 * CONFIG.job_pause_s * 6, abs=1.5)
    assert held_for_s(1.0) == pytest.approx(12.0, abs=1.5)
    assert held_for_s(20.0) == pytest.approx(240.0, abs=1.5)
