"""Which models may be woken for work without a client."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.scheduling.wishes import Wishes, may_wake, may_wake_to_sample
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs
from appliance.store.rows import JobJudgeRow
from scheduler.core.workload import Demand, Policy

OPEN = {"starter": {"replicas": [{"id": "r1", "state": "open"}]}}


class Asked(Wishes):
    """Wishes of a box whose gateways report nothing."""

    def __init__(self, db: Database, folder: Path, lines: tuple[str, ...] = ()) -> None:
        self.bus = Bus(folder / "bus.sock", ControllerConfig(), first_generation=1)
        hosts, self.reported = {"adapter": "starter"}, Demand()
        routing = SimpleNamespace(host=lambda name: hosts.get(name, name), demand=lambda model: self.reported)
        super().__init__(db, self.bus, routing, SimpleNamespace(models=lines), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "jobs", "others", "free", "expected"),
    [
        ("serve", True, False, 0, True),
        ("split", True, True, 1, True),
        ("serve", False, True, 0, False),
        ("auto", False, False, 8, True),
        ("auto", True, False, 8, False),
        ("train", False, False, 8, False),
    ],
)
def test_work_without_a_client_wakes_a_model_only_where_nobody_is_in_the_way(policy, jobs, others, free, expected):
    now = {"jobs_want_devices": jobs, "others_have_requests": others, "free_devices": free}
    assert may_wake(Policy(policy, 1), **now) is expected


@pytest.mark.parametrize(
    ("policy", "floor", "others", "free", "expected"),
    [
        ("split", 0, False, 0, True),
        ("serve", 0, True, 0, False),
        ("auto", 0, False, 0, False),  # it would take a device of the very job that it helps
        ("auto", 1, False, 0, True),
        ("auto", 1, True, 0, False),
        ("auto", 0, False, 1, True),
        ("train", 0, False, 0, False),
        ("train", 1, False, 0, True),
    ],
)
def test_rollouts_wake_a_model_only_on_devices_that_training_does_not_get(policy, floor, others, free, expected):
    now = {"others_have_requests": others, "free_devices": free}
    assert may_wake_to_sample(Policy(policy, 1, floor), **now) is expected


async def test_lines_wake_their_model_and_keep_it_awake(db, tmp_path):
    asked = Asked(db, tmp_path, lines=("adapter",))
    demand = asked.demands(1)
    assert demand("starter").held == 1, "an adapter, by its base's engines"
    assert demand("other") == Demand()
    asked.reported = Demand(inflight=3)
    assert demand("starter") == Demand(inflight=3), "people speak for themselves"
    asked.reported = Demand()
    asked.bus.set_models(OPEN | {"adapter": OPEN["starter"]})
    awake = asked.demands(1)("starter")
    assert awake.requests == 0 and awake.last_request_s is not None


@pytest.mark.parametrize(
    "columns",
    [{"method": "reinforcement", "resolved": {"options": {"rollouts": "engine"}}}, {"method": "distillation"}],
    ids=["samples", "teaches"],
)
async def test_running_job_keeps_the_model_it_asks_awake_whoever_wants_devices(
    db, tmp_path, add_model, add_job, columns
):
    add_model()
    job = add_job(phase="running", **columns)
    job_records.insert_judge(db, JobJudgeRow(job.id, {"teacher": "starter"}))
    asked = Asked(db, tmp_path)
    assert asked.demands(0)("starter") == Demand()
    asked.bus.set_models(OPEN)
    awake = asked.demands(0)("starter")
    assert awake.requests == 0 and awake.last_request_s is not None
    jobs.set_phase(db, job.id, "suspended")
    assert asked.demands(0)("starter") == Demand()
