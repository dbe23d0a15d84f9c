"""/admin/v1/handovers returns the steps of a handover with bytes and seconds."""

from __future__ import annotations

from dataclasses import asdict

from appliance.store.rows import HANDOVERS, HandoverRow
from scheduler.handover.effects import StepRecord
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import ask

IN_PLACE = {"how": "in-place", "bytes": 100, "bytes_read": [10_000_000_000, 10_000_000_000], "load_s": 2.0}
SNAPSHOT = {"bytes": 8_000_000_000, "seconds": {"agree": 0.1, "snapshot": 1.0, "exit": 0.2, "total": 1.3}}


async def test_handover_view_has_its_caller_and_speed(control: Control):
    why = {"asked_by": "ops", "asked_for": "mode train"}
    suspended = StepRecord(0, "c", "suspend_group", "j", "done", 10.0, 12.0, SNAPSHOT)
    steps = [asdict(suspended), asdict(StepRecord(1, "c", "wake_replica", "r", "done", 12.0, 14.0, IN_PLACE))]
    HANDOVERS.insert(control.db, HandoverRow(7, "mode train: …", 10.0, state="done", ended_s=14.0, steps=steps, **why))
    shown = await ask(control, "GET", "/handovers/7")
    assert shown | why | {"seconds": 4.0, "bytes": 28_000_000_000} == shown
    assert [step["bytes_per_s"] for step in shown["steps"]] == [8e9, 1e10]
    assert (await ask(control, "GET", "/handovers"))["data"] == [shown]
    assert (await ask(control, "GET", "/handovers/8", 404))["error"]["code"] == "handover_not_found"
