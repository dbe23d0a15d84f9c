"""Changes of a model's version: one at a time, and a failed one is taken back whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.controller.interfaces.errors import SwapFailed
from appliance.controller.models import activation
from appliance.store.objects import models
from appliance.store.rows import VersionRow

from .conftest import ADMIN, Control, insert_model


async def test_a_failed_change_leaves_a_version_that_was_published_meanwhile(control: Control, monkeypatch):
    insert_model(control.db, "m", versions=("v2", "v1"))

    async def overtaken(model: str) -> dict[str, Any]:
        models.insert_version(control.db, VersionRow(model, "v3", "test", 10, 1.0, disk_path="/models/v3"))
        models.activate(control.db, model, "v3")
        raise SwapFailed(model, "v2", "v3 came")

    monkeypatch.setattr(control.scheduler, "converge_model", overtaken)
    with pytest.raises(SwapFailed):
        await activation.switch(control.context, models.find(control.db, "m"), "v2", "a test")
    assert models.find(control.db, "m").active_version == "v3"


async def test_two_roll_backs_at_once_go_one_after_the_other(control: Control, monkeypatch):
    insert_model(control.db, "m", versions=("v1", "v2", "v3"))
    waiting, go = [], asyncio.Event()

    async def slow(model: str) -> dict[str, Any]:
        waiting.append(models.find(control.db, model).active_version)
        await go.wait()
        if waiting == ["v2"]:
            raise SwapFailed(model, "v2", "no memory")
        return {}

    monkeypatch.setattr(control.scheduler, "converge_model", slow)
    asked = [asyncio.create_task(control.http.post("/admin/v1/models/m/rollback", headers=ADMIN)) for _ in range(2)]
    while not waiting:
        await asyncio.sleep(0)
    assert waiting == ["v2"], "the second waits for the first"
    go.set()
    first, second = await asyncio.gather(*asked)
    assert (first.status_code, second.status_code) == (409, 200)
    assert (second.json()["from"], second.json()["to"]) == ("v3", "v2")
