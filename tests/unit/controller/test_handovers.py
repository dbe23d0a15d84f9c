"""/admin/v1/handovers: phases with bytes, seconds and the share of what the hardware was measured to copy."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.controller.admin import handover_views
from appliance.controller.devices import copy_limit
from appliance.store.records import box, handovers
from appliance.store.rows import HandoverRow, HandoverStepRow
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import actions, ask

CPU = {"memcpy_bytes_per_s": 1e10, "host_to_device_bytes_per_s": None, "measured_s": 1.0}
GPU = {**CPU, "host_to_device_bytes_per_s": 5e10}
SWAPPED = {"how": "in-place", "bytes": 100, "bytes_read": [5_000_000_000], "load_s": 1.0}
IN_PLACE = {"how": "in-place", "bytes": 100, "bytes_read": [10_000_000_000, 10_000_000_000], "load_s": 2.0}
SNAPSHOT = {"bytes": 8_000_000_000, "seconds": {"agree": 0.1, "snapshot": 1.0, "exit": 0.2, "total": 1.3}}


def seen(verb: str, detail: dict[str, Any], measured: dict[str, Any]) -> tuple[Any, ...]:
    step = handover_views.step(HandoverStepRow("1", 0, verb, "x", "done", 1.0, 3.5, {}, detail), measured)
    assert step["seconds"] == 2.5
    return step["bytes"], step["moved_s"], step["limit"], step["limit_fraction"], step["path"]


@pytest.mark.parametrize(
    ("verb", "detail", "measured", "expected"),
    [
        ("swap_replica", SWAPPED, CPU, (5_000_000_000, 1.0, "memcpy", 0.5, "in place")),
        ("swap_replica", IN_PLACE, CPU, (20_000_000_000, 2.0, "memcpy", 1.0, "in place")),
        ("wake_replica", IN_PLACE, GPU, (20_000_000_000, 2.0, "host_to_device", 0.1, "in place")),
        ("suspend_group", SNAPSHOT, CPU, (8_000_000_000, 1.0, "memcpy", 0.8, "shared memory")),
        ("suspend_group", {"bytes": 0, "seconds": {}}, CPU, (None, None, None, None, None)),
        ("swap_replica", SWAPPED, copy_limit.NONE, (5_000_000_000, 1.0, None, None, "in place")),
        ("start_group", {"bytes": 60, "seconds": 1.5, "ranks": "forked"}, CPU, (60, None, None, None, "shared memory")),
        ("start_replica", {"bytes": 10, "copied_bytes": 0}, CPU, (10, None, None, None, "shared memory")),
        ("drain_replica", {"model": "m"}, CPU, (None, None, None, None, None)),
    ],
)
def test_what_a_step_moved(verb: str, detail: dict[str, Any], measured: dict[str, Any], expected: tuple[Any, ...]):
    assert seen(verb, detail, measured) == expected


async def test_a_hand_over_says_who_asked_and_how_near_the_limit_it_came(control: Control):
    box.put(control.db, copy_limit.LIMITS, CPU)
    handovers.insert(
        control.db,
        HandoverRow("7", "mode train: …", "done", 10.0, 14.0, {"asked_by": "ops", "asked_for": "mode train"}),
        [
            HandoverStepRow("7", 0, "suspend_group", "j", "done", 10.0, 12.0, {"undoes": None}, SNAPSHOT),
            HandoverStepRow("7", 1, "wake_replica", "r", "done", 12.0, 14.0, {"undoes": None}, IN_PLACE),
        ],
    )
    shown = await ask(control, "GET", "/handovers/7")
    assert (shown["seconds"], shown["bytes"], shown["asked_by"], shown["asked_for"]) == (
        4.0,
        28_000_000_000,
        "ops",
        "mode train",
    )
    assert [step["limit_fraction"] for step in shown["steps"]] == [0.8, 1.0]
    assert (await ask(control, "GET", "/handovers"))["data"] == [shown]
    assert (await ask(control, "GET", "/handovers/8", 404))["error"]["code"] == "handover_not_found"


async def test_limits_are_measured_once_and_kept(control: Control, monkeypatch: pytest.MonkeyPatch):
    assert await ask(control, "GET", "/limits") == copy_limit.NONE
    asked: list[set[str]] = []
    rates = {"memcpy_bytes_per_s": 5.0, "host_to_device_bytes_per_s": None}
    monkeypatch.setattr(copy_limit, "measured", lambda kinds: (asked.append(kinds), rates)[1])
    found = await ask(control, "POST", "/limits/measure")
    assert found == {**rates, "measured_s": found["measured_s"]} == await ask(control, "GET", "/limits")
    assert asked == [{"cpu"}] and actions(control) == [("limits.measure", "box", "done")]


def test_a_copy_is_measured():
    assert copy_limit.memcpy_bytes_per_s(threads=2, buffer_bytes=1 << 20) > 0
