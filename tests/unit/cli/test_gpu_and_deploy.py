"""`appliance gpu drain|undrain` and `appliance model deploy`, from the real control app."""

from __future__ import annotations

import threading

from appliance.cli.models import engine_settings
from appliance.controller.devices import cordons, lost_nodes
from appliance.store.database import Database
from runtime.devices.kind import Reading
from tests.unit.cli.conftest import ControlledBox
from tests.unit.cli.test_tables_and_json import lines


def test_a_free_device_is_drained_shown_and_put_back(box: ControlledBox):
    told = box.run("gpu", "drain", "n0/3", "--reason", "fan noise").stdout.strip()
    assert told == "n0/3: drained (drained by box: fan noise), held by nobody"
    assert lines(box.run("gpu", "list").stdout)[4][-6:] == ["-", "drained", "by", "box:", "fan", "noise"]
    assert box.run("gpu", "undrain", "n0/3").stdout.strip() == "n0/3: ok, held by nobody"
    assert box.run("gpu", "drain", "n0/99").exit_code == 3


def test_a_device_that_nobody_drained_is_not_said_to_be(box: ControlledBox):
    with Database(box.context.db.path) as db:
        fault = {**cordons.new_row(db, "n0/1"), "fault": "two deaths"}
        cordons.write(db, {"n0/1": fault, "n0/2": fault})
    box.context.scheduler.devices[2]["holder"] = {"kind": "replica", "id": "r1-0"}
    seen = [line.split() for line in box.run("gpu", "list").stdout.splitlines()]
    assert seen[2][-4:] == ["cordoned", "-", "two", "deaths"]
    assert "draining" in seen[3], "its engine leaves it"


def test_a_device_whose_node_leaves_says_so(box: ControlledBox):
    """It was shown as sound: the view of the loop was taken for one that lagged."""
    box.context.scheduler.devices[3].update(health="draining", health_reason="its node leaves the box")
    assert "its node leaves the box" in box.run("gpu", "list").stdout
    box.context.scheduler.devices[3].update(health_reason="cordoned")
    assert "draining" not in box.run("gpu", "list").stdout, "just put back"


def test_draining_waits_until_the_holder_has_left(box: ControlledBox):
    device = box.context.scheduler.devices[2]
    device["holder"] = {"kind": "replica", "id": "r1-0"}
    late = box.run("gpu", "drain", "n0/2", "--timeout", "0")
    assert late.exit_code == 124 and "replica r1-0 has not left" in late.stderr
    assert box.json("gpu", "drain", "n0/2", "--no-wait")["holder"]["id"] == "r1-0"
    assert "draining" in lines(box.run("gpu", "list").stdout)[3]
    leaving = threading.Timer(0.2, lambda: device.update(holder=None))
    leaving.start()
    assert box.json("gpu", "drain", "n0/2")["holder"] is None
    leaving.join()


def test_lost_devices_are_listed_apart_and_forgotten(box: ControlledBox):
    away = [{**box.context.scheduler.devices[0], "id": "n1/0", "node": "n1"}]
    with Database(box.context.db.path) as db:  # the box's own belongs to its thread
        lost_nodes.joined(db, "n1", away)
        lost_nodes.lost(db, "n1", "its node does not answer any more", 0.0)
    assert "its node does not answer any more, since 1970" in box.run("gpu", "list").stdout
    assert "0 of 8 held, 1 lost" in box.run("status").stdout
    assert box.run("gpu", "forget", "n1").stdout.strip() == "n1 is forgotten with 1 device"
    assert "1 lost" not in box.run("status").stdout
    assert box.run("gpu", "forget", "n1").exit_code == 3


def test_nodes_are_listed_with_those_that_do_not_answer(box: ControlledBox):
    home, away = box.run("node", "list").stdout.splitlines()[1:]
    assert home.split()[:5] == ["n0", "127.0.0.1", "2", "2", "ms"] and "51.5 GB of 68.7 GB" in home and "home" in home
    assert away.split()[:3] == ["n1", "10.0.0.2", "1"] and "no answer" in away
    assert [node["id"] for node in box.json("node", "list")["data"]] == ["n0", "n1"]


def test_a_deployment_is_changed_and_shown(box: ControlledBox):
    made = box.json("model", "deploy", "starter", "--max-replicas", "3", "--ttft-p95-s", "1.5", "--pin")
    assert set(made) == {
        "model",
        "settings",
        "settings_history",
        "settings_note",
        "settings_number",
        "min_replicas",
        "max_replicas",
        "tensor_parallel",
        "ttft_p95_s",
        "tpot_p95_ms",
        "idle_sleep_s",
        "pinned",
        "failed_reason",
    }
    assert (made["max_replicas"], made["ttft_p95_s"], made["pinned"]) == (3, 1.5, True)
    assert box.json("model", "deploy", "starter", "--ttft-p95-s", "none", "--unpin")["ttft_p95_s"] is None
    assert "0 to 3" in box.run("model", "deploy", "starter").stdout
    assert box.run("model", "deploy", "starter", "--max-replicas", "many").exit_code == 2
    assert box.run("model", "deploy", "nobody").exit_code == 3


def test_parsers_are_named_where_the_model_chats():
    known = {"chat_template": True, "tool_parser": None, "reasoning_parser": "qwen3"}
    assert engine_settings.parsers(known) == [
        ("tool calls", "where required or named, not by tool_choice auto: no parser"),
        ("reasoning", "parser qwen3"),
    ]
    assert engine_settings.parsers({**known, "tool_parser": "hermes"})[0] == ("tool calls", "parser hermes")
    assert engine_settings.parsers({**known, "chat_template": False}) == engine_settings.parsers({}) == []


def test_what_devices_tell_of_themselves_stands_in_the_list_where_any_does(box: ControlledBox):
    assert "HEAT" not in box.run("gpu", "list").stdout
    box.context.health.newest = lambda: {
        "n0/1": Reading("n0/1", 0.0, temperature_c=61, power_w=690.4, power_limit_w=700.0, throttled=("power_cap",))
    }
    head, _, first, *_ = box.run("gpu", "list").stdout.splitlines()
    assert head.split()[3:8] == ["MEMORY", "USED", "HEAT", "POWER", "BUSY"]
    assert "61 °C" in first and "690 W of 700 W (power cap)" in first
    assert box.json("status")["devices"][1]["meters"]["power_w"] == 690.4
