"""/admin/v1/mode, /queue and /devices: operator changes of modes, jobs, devices and deployments."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from appliance.controller.devices.mode import floor_notes, mode_in_force, read_mode
from appliance.controller.jobs import settings
from appliance.controller.scheduling.state_store import job_host_bytes
from appliance.store import jobs
from appliance.store.rows import DEPLOYMENTS, WINDOWS
from scheduler.core.workload import Policy
from tests.unit.controller.conftest import SCOPES, Control
from tests.unit.controller.test_admin import actions, ask

NIGHT = {"cron": "0 22 * * *", "until": "0 6 * * *", "tz": "Europe/Berlin", "policy": "train", "serving_floor": 2}
ALWAYS = {"cron": "* * * * *", "policy": "split", "train_devices": 3}


async def test_mode_without_floor_gets_floor_of_the_box(control: Control):
    await ask(control, "PUT", "/mode", json={"policy": "train", "serving_floor": 2})
    assert mode_in_force(control.db, 1, time.time()).policy.serving_floor == 2
    assert (await ask(control, "PUT", "/mode", json={"policy": "train"}))["serving_floor"] == 1
    error = (await ask(control, "PUT", "/mode", 400, json={"policy": "train", "serving_floor": 9}))["error"]
    assert error["param"] == "serving_floor"


@pytest.mark.parametrize(("devices", "notes"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_floor_note_appears_only_if_floor_keeps_all_devices(devices: int, notes: int):
    assert len(floor_notes(Policy("train", None, 2), devices)) == notes


async def test_mode_set_by_hand_overrides_the_current_window(control: Control):
    await ask(control, "PUT", "/mode", json={"policy": "serve"})
    made = await ask(control, "POST", "/mode/schedule", json={**ALWAYS, "cron": "0 0 1 1 *"})
    held = await ask(control, "GET", "/mode")
    if held["set_by"] == "hand":  # unless a year began during the test
        assert held["overridden"]["id"] == made["id"] and held["until_s"] == made["next_s"]
    minute = await ask(control, "POST", "/mode/schedule", json=ALWAYS)
    before = read_mode(control.db)
    control.db.execute("UPDATE box SET value = json_set(value, '$.since_s', 5.0) WHERE name = 'mode'")
    held = await ask(control, "GET", "/mode")
    assert (held["set_by"], held["policy"], held["train_devices"]) == ("window", "split", 3)
    assert held["window"]["id"] == minute["id"] and held["by_hand"]["policy"] == "serve"
    again = await ask(control, "PUT", "/mode", json={"policy": "serve"})
    assert again["set_by"] == "hand" and again["since_s"] > before.since_s
    assert again["overridden"]["id"] == minute["id"] and again["until_s"] - time.time() <= 60
    status = await ask(control, "GET", "/status")
    assert status["mode"] == {"policy": "serve", "train_devices": None}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**NIGHT, "cron": "at night"}, "cron"),
        ({**NIGHT, "cron": "0 0 30 2 *"}, "cron"),
        ({**NIGHT, "for_s": 60.0}, "until"),
        ({**NIGHT, "tz": "Berlin"}, "tz"),
        ({"cron": "0 1 * * *", "policy": "train", "for_s": 0.5}, "for_s"),
        ({**NIGHT, "serving_floor": 9}, "serving_floor"),
    ],
)
async def test_invalid_window_is_rejected_without_changes(control: Control, body: dict[str, Any], param: str):
    error = (await ask(control, "POST", "/mode/schedule", 400, json=body))["error"]
    assert error["param"] == param and WINDOWS.list_all(control.db) == [] and actions(control) == []


async def test_mode_plan_changes_nothing(control: Control):
    assert (await ask(control, "POST", "/mode/plan"))["policy"] == "auto"
    assert (await ask(control, "POST", "/mode/plan", json={"policy": "train", "serving_floor": 1}))["policy"] == "train"
    error = (await ask(control, "POST", "/mode/plan", 400, json={"policy": "split"}))["error"]
    assert error["param"] == "train_devices"
    assert read_mode(control.db).policy == "auto" and actions(control) == [] and control.scheduler.nudges == []


async def test_job_without_a_valid_size_is_refused_with_valid_sizes(control: Control):
    with pytest.raises(openai.BadRequestError, match="1, 2, 4 devices") as refused:
        await control.job(hyperparameters={"batch_size": 8}, extra_body={"min_devices": 5, "max_devices": 7})
    assert refused.value.param == "min_devices"


def joined(control: Control, node: str, count: int) -> list[dict[str, Any]]:
    return [{**control.scheduler.devices[0], "id": f"{node}/{i}", "node": node, "index": i} for i in range(count)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"min_devices": 20}}, "min_devices"),
        ({"extra_body": {"min_devices": 5000}}, "min_devices"),
        ({"hyperparameters": {"batch_size": 10}, "extra_body": {"min_devices": 6, "max_devices": 10}}, "min_devices"),
    ],
)
async def test_job_needing_more_devices_than_any_node_is_rejected(control: Control, fields: dict[str, Any], param: str):
    # A second node allows no larger jobs, because all ranks of a job run on one node.
    control.scheduler.devices = control.scheduler.devices + joined(control, "n1", 4)
    with pytest.raises(openai.BadRequestError) as refused:
        await control.job(**fields)
    assert (refused.value.param, refused.value.code) == (param, "insufficient_devices")
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


async def test_queue_has_the_planners_order_and_reasons(control: Control):
    first, second, third = [await control.job(suffix=name) for name in ("a", "b", "c")]
    jobs.set_phase(control.db, second, "running", devices=["n0/0", "n0/1"])
    control.scheduler.queue = [
        {"id": second, "position": 1, "phase": "running", "devices": ["n0/0", "n0/1"], "reason": None, "message": ""},
        {"id": first, "position": 2, "phase": "wanted", "devices": [], "reason": "Resources", "message": "Needs 1."},
    ]
    answer = await ask(control, "GET", "/queue")
    assert [(e["position"], e["id"], e["reason"]) for e in answer["data"]] == [
        (1, second, None),
        (2, first, "Resources"),
        (3, third, "Priority"),
    ]
    assert answer["data"][1]["message"] == "Needs 1."
    assert answer["owners"] == [{"owner": SCOPES["x-appliance-key-id"], "running": 1, "waiting": 2, "devices": 2}]
    jobs.set_wanted(control.db, third, "cancel")
    assert len((await ask(control, "GET", "/queue"))["data"]) == 2


async def test_waiting_job_can_be_changed(control: Control):
    job_id = await control.job(hyperparameters={"batch_size": 8})
    assert jobs.get(control.db, job_id).allowed_sizes == [1, 2, 4, 8]
    changed = await ask(control, "PATCH", f"/jobs/{job_id}", json={"priority": 7, "max_devices": 4, "deadline_s": 9.0})
    assert (changed["priority"], changed["allowed_sizes"], changed["deadline_s"]) == (7, [1, 2, 4], 9.0)
    changed = await ask(control, "PATCH", f"/jobs/{job_id}", json={"deadline_s": None, "min_devices": 2})
    assert (changed["priority"], changed["allowed_sizes"], changed["deadline_s"]) == (7, [2, 4], None)
    changed = await ask(control, "PATCH", f"/jobs/{job_id}", json={"min_devices": None, "max_devices": None})
    assert changed["allowed_sizes"] == [1, 2, 4, 8]
    assert "Changed by an operator: deadline_s none, min_devices 2." in await control.messages(job_id)
    assert actions(control)[0] == ("job.update", job_id, "done")


async def test_update_of_device_bounds_adds_memory_estimates_for_new_sizes(control: Control):
    job_id = await control.job(hyperparameters={"batch_size": 8}, extra_body={"max_devices": 2})
    await ask(control, "PATCH", f"/jobs/{job_id}", json={"max_devices": 8})
    needed = job_host_bytes(jobs.get(control.db, job_id))
    assert needed.keys() == {1, 2, 4, 8} and 0 < needed[2] < needed[8]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"preemptible": None}, "preemptible"),
        ({"min_devices": 3, "max_devices": 2}, "min_devices"),
        ({"min_devices": 5, "max_devices": 7}, "min_devices"),
    ],
)
async def test_invalid_job_update_changes_nothing(control: Control, body: dict[str, Any], param: str | None):
    job_id = await control.job(hyperparameters={"batch_size": 8})
    before = jobs.get(control.db, job_id)
    error = (await ask(control, "PATCH", f"/jobs/{job_id}", 400, json=body))["error"]
    assert error["param"] == param and jobs.get(control.db, job_id) == before and actions(control) == []


@pytest.mark.parametrize(("wish", "sizes"), [({}, [1, 2]), ({"max_devices": 4}, [1, 2, 4]), ({"min_devices": 4}, [4])])
async def test_job_on_logical_devices_is_limited_to_cores_by_default(
    control: Control, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], sizes: list[int]
):
    monkeypatch.setattr(settings, "host_cores", lambda: 2)
    job_id = await control.job(hyperparameters={"batch_size": 8}, extra_body=wish)
    assert jobs.get(control.db, job_id).allowed_sizes == sizes


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_replicas": 2, "max_replicas": 1}, "max_replicas"),
        ({"pinned": True, "max_replicas": 0}, "max_replicas"),
        ({"tensor_parallel": 16}, "tensor_parallel"),
        ({"tensor_parallel": 4, "min_replicas": 3}, "min_replicas"),
        ({"pinned": None}, "pinned"),
        ({"ttft_p95_s": 0}, "ttft_p95_s"),
        ({"replicas": 1}, "replicas"),
    ],
)
async def test_invalid_deployment_is_rejected(control: Control, body: dict[str, Any], param: str):
    error = (await ask(control, "PATCH", "/models/starter/deployment", 400, json=body))["error"]
    assert error["param"] == param and DEPLOYMENTS.find(control.db, "starter") is None and actions(control) == []


async def test_deploy_that_exceeds_devices_of_nodes_is_refused(control: Control):
    first = control.scheduler.devices[0]
    away = [{**first, "id": f"n1/{i}", "node": "n1", "index": i} for i in range(4)]
    control.scheduler.devices = control.scheduler.devices[:6] + away
    path = "/models/starter/deployment"
    error = (await ask(control, "PATCH", path, 400, json={"tensor_parallel": 8}))["error"]
    assert (error["param"], error["code"]) == ("tensor_parallel", "insufficient_devices")
    error = (await ask(control, "PATCH", path, 400, json={"tensor_parallel": 4, "min_replicas": 3}))["error"]
    assert error["param"] == "min_replicas"
    assert (await ask(control, "PATCH", path, json={"tensor_parallel": 4, "min_replicas": 2}))["min_replicas"] == 2
    control.scheduler.devices = control.scheduler.devices[:2]  # now n1 and four home devices are gone
    assert (await ask(control, "PATCH", path, json={"ttft_p95_s": 2.0}))["tensor_parallel"] == 4
