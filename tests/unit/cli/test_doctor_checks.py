"""The checks of `appliance doctor`, on this machine and on simulated boxes."""

import json
import re
from pathlib import Path

import pytest

from appliance import alerts
from appliance.boot import doctor as checks
from appliance.boot.doctor import findings
from appliance.cli.command import COMMANDS
from appliance.cli.commands import box
from appliance.cli.locate import BoxFile
from appliance.config import load_config
from tests.unit.cli.conftest import run
from tests.unit.cli.test_tree import is_command


def test_findings_cover_this_machine_and_leave_no_files(tmp_path: Path):
    config = load_config(None, {"data_dir": str(tmp_path / "box" / "not" / "there"), "devices": 2})
    found = {one.check: one for one in findings(config, runs=False)}
    assert found["devices"].found == "2 of kind cpu" and {found["box"].state, found["keys"].state} == {"skip"}
    assert {"memory available", "swap", "shared memory", "disk free", "file system", "port"} <= set(found)
    assert all(one.remedy for one in found.values() if one.state in ("warn", "fail"))
    assert list(tmp_path.iterdir()) == []


def test_send_test_uses_options_of_the_running_box(tmp_path: Path, monkeypatch):
    started = load_config(None, {"data_dir": str(tmp_path), "port": 9876})
    (tmp_path / "config.json").write_text(started.model_dump_json())
    ports: list[int] = []
    monkeypatch.setattr(BoxFile, "pid", property(lambda _: 1))
    monkeypatch.setattr(box, "_send_test", lambda _, settings: ports.append(settings.box.port))
    COMMANDS["doctor"].call(["--send-test", "--data-dir", str(tmp_path)])
    assert ports == [9876]


def test_send_test_tries_all_channels_and_names_failures(tmp_path: Path, monkeypatch):
    def refuse(_settings, channel, *_):
        raise alerts.Undelivered(f"{channel} refused")

    monkeypatch.setattr(alerts, "send", refuse)
    file = tmp_path / "appliance.toml"
    file.write_text('[alerts]\nwebhook = "http://127.0.0.1:9"\nemail = ["a@b.org"]\n')
    done = run("doctor", "--send-test", "--data-dir", str(tmp_path))
    assert (done.exit_code, done.stderr) == (1, "error: not delivered: webhook refused; e-mail refused\n")


def test_remedies_name_existing_commands():
    text = Path(checks.__file__).read_text().replace('"\n        f"', "").replace('"\n        "', "")
    named = set(re.findall(r"`appliance ([^`]*)`", text))
    named = {re.sub(r"\{[^}]*\}", "n0/0", command) for command in named}
    assert len(named) >= 8 and "gpu undrain n0/0" in named
    assert {command for command in named if not is_command(command)} == set()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"state": "failed", "message": "port 8000 is in use"}, "it did not start: port 8000 is in use"),
        ({"state": "stopped", "message": "the disk is full"}, "it ended: the disk is full"),
        ({"state": "stopped", "message": ""}, ""),
        ({"state": "ready"}, "it was killed while ready"),
        ({}, ""),
    ],
)
def test_doctor_reports_why_the_box_ended(tmp_path: Path, fields: dict[str, str], told: str):
    file = tmp_path / "box.json"
    file.write_text(json.dumps(fields))
    (found,) = checks._box(tmp_path, runs=False)
    assert (found.state, found.found) == (("warn", f"does not run: {told}") if told else ("skip", "does not run"))
