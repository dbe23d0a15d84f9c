"""/admin/v1/mode: floors, mode windows and what a mode would do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from appliance.controller.devices.mode import mode_in_force, read_mode
from appliance.store.records import windows
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import actions, ask

NIGHT = {"cron": "0 22 * * *", "until": "0 6 * * *", "tz": "Europe/Berlin", "policy": "train", "serving_floor": 2}
ALWAYS = {"cron": "* * * * *", "policy": "split", "train_devices": 3}


async def test_a_mode_has_a_floor_of_its_own_or_the_boxs(control: Control):
    await ask(control, "PUT", "/mode", json={"policy": "train", "serving_floor": 2})
    assert mode_in_force(control.db, 1, time.time()).policy.serving_floor == 2
    assert (await ask(control, "PUT", "/mode", json={"policy": "train"}))["serving_floor"] == 1
    error = (await ask(control, "PUT", "/mode", 400, json={"policy": "train", "serving_floor": 9}))["error"]
    assert error["param"] == "serving_floor"


async def test_a_mode_set_by_hand_overrides_the_window_even_if_it_was_the_mode_before(control: Control):
    await ask(control, "PUT", "/mode", json={"policy": "serve"})
    made = await ask(control, "POST", "/mode/schedule", json={**ALWAYS, "cron": "0 0 1 1 *"})
    held = await ask(control, "GET", "/mode")
    if held["set_by"] == "hand":  # the person's mode is younger than the last New Year
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
async def test_bad_windows_are_refused_and_change_nothing(control: Control, body: dict[str, Any], param: str):
    error = (await ask(control, "POST", "/mode/schedule", 400, json=body))["error"]
    assert error["param"] == param and windows.list_all(control.db) == [] and actions(control) == []


async def test_a_plan_says_what_would_happen_and_changes_nothing(control: Control):
    assert (await ask(control, "POST", "/mode/plan"))["policy"] == "auto"
    assert (await ask(control, "POST", "/mode/plan", json={"policy": "train", "serving_floor": 1}))["policy"] == "train"
    error = (await ask(control, "POST", "/mode/plan", 400, json={"policy": "split"}))["error"]
    assert error["param"] == "train_devices"
    assert read_mode(control.db).policy == "auto" and actions(control) == [] and control.scheduler.nudges == []
