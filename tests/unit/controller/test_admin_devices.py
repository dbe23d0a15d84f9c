"""/admin/v1/devices: drain and undrain; /admin/v1/models/{name}/deployment: how a model is served."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.store.records import deployments
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import actions, ask


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
