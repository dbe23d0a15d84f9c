"""Which models may be woken for work without a client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import write_mode
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.records import Mode
from appliance.controller.scheduling.state_store import Wishes
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.rows import JobJudgeRow
from scheduler.core.workload import Demand
from weights.format.names import policy_name

NO_POLICIES: Mapping[str, str] = MappingProxyType({})
OPEN = {"starter": {"replicas": [{"id": "r1", "state": "open"}]}}


class Asked(Wishes):
    """Wishes of a box whose gateways report nothing."""

    def __init__(
        self, db: Database, folder: Path, lines: tuple[str, ...] = (), policies: Mapping[str, str] = NO_POLICIES
    ) -> None:
        self.bus = Bus(folder / "bus.sock", ControllerConfig(), first_generation=1)
        hosts, self.reported = {"adapter": "starter", **policies}, Demand()
        routing = SimpleNamespace(
            host=lambda name: hosts.get(name, name), demand=lambda model: self.reported, policies=policies
        )
        super().__init__(db, self.bus, routing, SimpleNamespace(models=lines), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "has_job", "others_ask", "free", "wakes"),
    [
        ("serve", True, False, 0, True),
        ("split", True, True, 1, True),
        ("serve", False, True, 0, False),
        ("auto", False, False, 8, True),
        ("auto", True, False, 8, False),
        ("train", False, False, 8, False),
    ],
)
async def test_lines_wake_a_model_only_where_nobody_is_in_the_way(
    db, tmp_path, add_model, add_job, mode, has_job, others_ask, free, wakes
):
    write_mode(db, Mode(mode, 1))
    if has_job:
        add_model()
        add_job()
    asked = Asked(db, tmp_path, lines=("starter",))
    others = {"other": SimpleNamespace(inflight=1, held=0)} if others_ask else {}
    asked.bus.load = lambda: SimpleNamespace(models=others)
    assert asked.demands(free)("starter").held == wakes


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


@pytest.mark.parametrize("method", ["reinforcement", "distillation"])
async def test_running_job_keeps_the_model_it_asks_awake_in_every_mode(db, tmp_path, add_model, add_job, method):
    add_model()
    job = add_job(phase="running", method=method)
    jobs.insert_judge(db, JobJudgeRow(job.id, {"teacher": "starter"}))
    policies = {policy_name(job.id): "starter"} if method == "reinforcement" else {}
    asked = Asked(db, tmp_path, policies=policies)
    assert asked.demands(0)("starter") == Demand(), "nothing is asked yet"
    lines = tuple(policies) or ("starter",)
    assert Asked(db, tmp_path, lines, policies).demands(0)("starter").held == 1
    asked.bus.set_models(OPEN)
    awake = asked.demands(0)("starter")
    assert awake.requests == 0 and awake.last_request_s is not None
    jobs.set_phase(db, job.id, "suspended")
    assert asked.demands(0)("starter") == Demand(), "its devices are wanted"
