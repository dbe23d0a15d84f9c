"""/admin/v1/handovers: phases with bytes and seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from appliance.controller.admin.box import step_view
from appliance.store.rows import HANDOVERS, HandoverRow
from scheduler.handover.effects import StepRecord
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import ask

IN_PLACE = {"how": "in-place", "bytes": 100, "bytes_read": [10_000_000_000, 10_000_000_000], "load_s": 2.0}
SNAPSHOT = {"bytes": 8_000_000_000, "seconds": {"agree": 0.1, "snapshot": 1.0, "exit": 0.2, "total": 1.3}}


def seen(verb: str, detail: dict[str, Any]) -> tuple[Any, ...]:
    step = step_view(StepRecord(0, "c", verb, "x", "done", 1.0, 3.5, detail))
    assert step["seconds"] == 2.5
    return step["bytes"], step["moved_s"], step["path"]


@pytest.mark.parametrize(
    ("verb", "detail", "expected"),
    [
        ("swap_replica", IN_PLACE, (20_000_000_000, 2.0, "in place")),
        ("suspend_group", SNAPSHOT, (8_000_000_000, 1.0, "shared memory")),
        ("suspend_group", {"bytes": 0, "seconds": {}}, (None, None, None)),
        ("start_replica", {"bytes": 10}, (10, None, "shared memory")),
        ("drain_replica", {"model": "m"}, (None, None, None)),
    ],
)
def test_what_a_step_moved(verb: str, detail: dict[str, Any], expected: tuple[Any, ...]):
    assert seen(verb, detail) == expected


async def test_a_hand_over_says_who_asked_and_how_fast_it_was(control: Control):
    why = {"asked_by": "ops", "asked_for": "mode train"}
    suspended = StepRecord(0, "c", "suspend_group", "j", "done", 10.0, 12.0, SNAPSHOT)
    steps = [asdict(suspended), asdict(StepRecord(1, "c", "wake_replica", "r", "done", 12.0, 14.0, IN_PLACE))]
    HANDOVERS.insert(control.db, HandoverRow(7, "mode train: …", 10.0, state="done", ended_s=14.0, steps=steps, **why))
    shown = await ask(control, "GET", "/handovers/7")
    assert shown | why | {"seconds": 4.0, "bytes": 28_000_000_000} == shown
    assert [step["bytes_per_s"] for step in shown["steps"]] == [8e9, 1e10]
    assert (await ask(control, "GET", "/handovers"))["data"] == [shown]
    assert (await ask(control, "GET", "/handovers/8", 404))["error"]["code"] == "handover_not_found"
