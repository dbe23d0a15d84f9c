"""/admin/v1/devices: drain and undrain; /admin/v1/models/{name}/deployment: how a model is served."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.controller.devices import cordons, lost_nodes
from appliance.store.records import deployments
from tests.unit.controller.conftest import ADMIN, Control, insert_model
from tests.unit.controller.test_admin import actions, ask


async def test_a_device_is_drained_with_a_reason_and_put_back(control: Control):
    job_id = await control.job()
    control.scheduler.devices[3]["holder"] = {"kind": "job", "id": job_id}
    for _ in range(2):
        drained = await ask(control, "POST", "/devices/n0/3/drain", json={"reason": "row remap"})
        assert (drained["health"], drained["health_reason"]) == ("draining", "drained by key_admin: row remap")
        assert drained["drain"]["by"] == "key_admin" and drained["holder"]["id"] == job_id
    assert cordons.cordoned(control.db) == ["n0/3"]
    told = [text for text in await control.messages(job_id) if "n0/3" in text]
    assert told == ["Device n0/3 is drained by an operator: row remap; the job moves off it."], "once, not every time"
    listed = {d["id"]: d["health"] for d in (await ask(control, "GET", "/devices"))["data"]}
    assert listed["n0/3"] == "draining" and listed["n0/2"] == "ok"
    for _ in range(2):
        back = await ask(control, "POST", "/devices/n0%2F3/undrain")
        assert (back["health"], back["drain"]) == ("ok", None)
    assert cordons.cordoned(control.db) == []
    assert [name for name, _, _ in actions(control)] == ["device.drain"] * 2 + ["device.undrain"] * 2
    assert "drain of n0/3" in control.scheduler.nudges
    error = (await ask(control, "POST", "/devices/n0/99/drain", 404))["error"]
    assert error["code"] == "device_not_found"


async def test_devices_of_a_lost_node_are_shown_until_they_are_forgotten(control: Control):
    there = control.scheduler.devices
    away = [{**there[0], "id": f"n1/{index}", "node": "n1", "index": index} for index in range(2)]
    assert (await ask(control, "DELETE", "/nodes/n1", 404))["error"]["code"] == "node_not_lost"
    lost_nodes.joined(control.db, "n1", away)
    assert (await ask(control, "DELETE", "/nodes/n1", 404))["error"]["code"] == "node_not_lost", "it is there"
    lost_nodes.lost(control.db, "n1", "gone", 1234.0)
    listed = (await ask(control, "GET", "/devices"))["data"]
    assert [d["id"] for d in listed] == [d["id"] for d in there] + ["n1/0", "n1/1"]
    assert listed[-1]["health"] == "lost" and listed[-1]["lost"] == {"since_s": 1234.0, "reason": "gone"}
    assert [d["id"] for d in (await ask(control, "GET", "/status"))["devices"]] == [d["id"] for d in listed]
    metrics = (await control.http.get("/admin/v1/metrics", headers=ADMIN)).text
    assert 'appliance_devices{health="lost",holder="none"} 2.0' in metrics

    drained = await ask(control, "POST", "/devices/n1/1/drain", json={"reason": "its fan too"})
    assert (drained["health"], drained["drain"]["reason"]) == ("lost", "its fan too"), "for when it is back"
    assert (await ask(control, "DELETE", "/nodes/n1"))["devices"] == ["n1/0", "n1/1"]
    assert len((await ask(control, "GET", "/devices"))["data"]) == len(there)
    assert cordons.cordoned(control.db) == [], "nobody could lift it any more"
    assert actions(control)[-1] == ("node.forget", "n1", "done")


async def test_a_deployment_is_changed_field_by_field(control: Control):
    assert (await ask(control, "GET", "/models/starter/deployment"))["max_replicas"] is None
    made = await ask(control, "PATCH", "/models/starter/deployment", json={"min_replicas": 1, "max_replicas": 4})
    assert (made["min_replicas"], made["max_replicas"], made["pinned"]) == (1, 4, False)
    made = await ask(
        control,
        "PATCH",
        "/models/starter/deployment",
        json={"ttft_p95_s": 2, "tpot_p95_ms": 80.5, "idle_sleep_s": 600, "pinned": True, "tensor_parallel": 2},
    )
    assert (made["max_replicas"], made["ttft_p95_s"], made["tpot_p95_ms"]) == (4, 2, 80.5)
    made = await ask(control, "PATCH", "/models/starter/deployment", json={"max_replicas": None, "ttft_p95_s": None})
    assert (made["max_replicas"], made["ttft_p95_s"], made["idle_sleep_s"]) == (None, None, 600)
    row = deployments.find(control.db, "starter")
    assert row is not None and (row.pinned, row.tensor_parallel, row.max_replicas) == (1, 2, None)
    assert (await ask(control, "GET", "/models/starter"))["deployment"] == made
    assert actions(control) == [("model.deploy", "starter", "done")] * 3
    assert control.scheduler.failures_reset == ["starter"] * 3
    insert_model(control.db, "team/model")
    assert (await ask(control, "PATCH", "/models/team/model/deployment", json={"pinned": True}))["pinned"] is True
    await ask(control, "PATCH", "/models/none/deployment", 404, json={"pinned": True})


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
async def test_deployments_that_cannot_be_are_refused(control: Control, body: dict[str, Any], param: str):
    error = (await ask(control, "PATCH", "/models/starter/deployment", 400, json=body))["error"]
    assert error["param"] == param and deployments.find(control.db, "starter") is None and actions(control) == []


async def test_an_engine_spans_no_nodes(control: Control):
    first = control.scheduler.devices[0]
    away = [{**first, "id": f"n1/{i}", "node": "n1", "index": i} for i in range(4)]
    control.scheduler.devices = control.scheduler.devices[:6] + away
    path = "/models/starter/deployment"
    error = (await ask(control, "PATCH", path, 400, json={"tensor_parallel": 8}))["error"]
    assert (error["param"], error["code"]) == ("tensor_parallel", "insufficient_devices")
    error = (await ask(control, "PATCH", path, 400, json={"tensor_parallel": 4, "min_replicas": 3}))["error"]
    assert error["param"] == "min_replicas"
    assert (await ask(control, "PATCH", path, json={"tensor_parallel": 4, "min_replicas": 2}))["min_replicas"] == 2
    control.scheduler.devices = control.scheduler.devices[:2]  # n1 left in order, and four of home's were taken out
    assert (await ask(control, "PATCH", path, json={"ttft_p95_s": 2.0}))["tensor_parallel"] == 4
