"""`appliance support bundle`: what is in the archive, and that no secret is."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

from appliance.cli.commands import machine as support
from tests.unit.cli.conftest import ControlledBox, run

SECRET = "Zq7Canary93xW"


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive}


def test_bundle_of_a_stopped_box_has_logs_and_configuration_without_secrets(tmp_path: Path):
    logs = tmp_path / "box" / "logs"
    (logs / "ray").mkdir(parents=True)
    (tmp_path / "box" / "box.json").write_text("{}")
    (logs / "controller.log").write_text(f"hub_token={SECRET}\nall is well\n")
    (logs / "ray" / "raylet.out").write_text(f"https://who:{SECRET}@hub.example/x\n")
    (logs / "old.log").write_text("old\n")
    os.utime(logs / "old.log", (1000.0, 1000.0))
    target = tmp_path / "bundle.tar.gz"
    arguments = ("support", "bundle", "--data-dir", str(tmp_path / "box"), "--to", str(target), "-o", "json")
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    packed = unpacked(target)
    assert list(packed) == json.loads(found.stdout)["files"]
    assert {"doctor.json", "status.json", "box.json", "df.txt", "pip.txt"} <= packed.keys()
    assert packed["logs/controller.log"] == "hub_token=<secret>\nall is well\n"
    assert packed["logs/ray/raylet.out"] == "https://<secret>hub.example/x\n"
    assert "logs/old.log" not in packed and SECRET not in str(packed)
    assert os.stat(target).st_mode & 0o777 == 0o600
    assert run(*arguments).exit_code == 2  # the file exists


def test_bundle_asks_a_running_box(box: ControlledBox, tmp_path: Path):
    assert box.run("support", "bundle", "--to", str(tmp_path / "bundle.tar.gz")).exit_code == 0
    packed = unpacked(tmp_path / "bundle.tar.gz")
    assert json.loads(packed["gpu-list.json"])["data"] and json.loads(packed["status.json"])["box"]


def test_without_secrets_redacts_values_of_named_fields():
    for before, after in {
        '{"api_key": "abc def"}': '{"api_key": "<secret>"}',
        "password=hunter2-long next": "password=<secret> next",
        '{"hf_token": null, "max_tokens": 12}': '{"hf_token": null, "max_tokens": 12}',
        "authorization: Bearer abcdefgh": "authorization: <secret>",
        "the key sk-appl-12345678 answered": "the key <secret> answered",
    }.items():
        assert support.without_secrets(before) == after
