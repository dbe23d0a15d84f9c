"""A bundle of a data directory in which every source has a planted secret."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time

import pytest

from appliance.cli.box.support import without_graders
from appliance.config import load_config
from appliance.paths import BoxPaths
from appliance.support import main as support
from appliance.support import sources
from appliance.support.redaction import Redaction
from appliance.support.sources import Missing, Part

CANARY = "Zq7Canary93xW"


@pytest.fixture
def config(tmp_path):
    paths = BoxPaths.of(tmp_path / "box")
    (paths.logs / "ray").mkdir(parents=True)
    paths.ray_token.write_text(f"{CANARY}-of-ray\n")
    paths.first_key.write_text(f"sk-appl-{CANARY}\n")
    paths.state_file.write_text(
        json.dumps({"state": "failed", "message": f"no room, https://who:{CANARY}@hub.example"})
    )
    (paths.logs / "controller.log").write_text(f"Ray's token is {CANARY}-of-ray\nall is well\n")
    (paths.logs / "ray" / "raylet.out").write_text(f"https://who:{CANARY}@hub.example/x\n")
    return load_config(None, {"data_dir": str(paths.data_dir)})


def _unpacked(path):
    with tarfile.open(path) as archive:
        return {entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive}


def test_a_bundle_has_what_is_needed_and_no_secret(config, tmp_path, monkeypatch, capsys):
    answers = {
        "parts": {"status.json": json.dumps({"by": "anna", "api_key": CANARY})},
        "missing": {"audit.json": f"no answer of https://x:{CANARY}@box"},
        "names": ["anna"],
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(answers)))
    output = tmp_path / "bundle.tar.gz"
    assert support.main(["--config-json", config.model_dump_json(), "--output", str(output), "--hours", "1"]) == 0
    packed, manifest = _unpacked(output), json.loads(capsys.readouterr().out)
    assert {"README.txt", "manifest.json", "config.json", "versions.json", "doctor.json"} <= packed.keys()
    assert packed["logs/controller.log"] == "Ray's token is <secret of the box>\nall is well\n"
    assert packed["logs/ray/raylet.out"] == "https://hub.example/x\n"
    assert json.loads(packed["box.json"])["message"] == "no room, https://hub.example", "why it does not run"
    assert json.loads(packed["box/status.json"]) == {"by": "name-1", "api_key": "<secret>"}
    assert not [name for name, text in packed.items() if CANARY in text or "anna" in text]
    assert json.loads(packed["manifest.json"]) == manifest
    assert manifest["missing"][0] == {"name": "box/audit.json", "why": "no answer of https://box"}
    assert os.stat(output).st_mode & 0o777 == 0o600


def test_an_existing_file_is_not_written_over(tmp_path):
    output = tmp_path / "bundle.tar.gz"
    output.write_text("somebody's")
    with pytest.raises(FileExistsError):
        support.write(output, [Part("a", "text", "here")], Redaction(), now_s=0.0)
    assert output.read_text() == "somebody's"


def test_of_a_long_log_its_end_from_a_whole_line_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LOG_BYTES", 30)
    (tmp_path / "a.log").write_text("api_key=" + "x" * 50 + " end of a line\nlast line\n")
    (part,) = sources.logs(tmp_path, since_s=0.0)
    assert part.text == "[53 bytes before]\nlast line\n"


def test_logs_too_old_too_many_or_elsewhere_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ALL_LOGS_BYTES", 5)
    for age_s, name in enumerate(("new.log", "more.log", "old.log")):
        (tmp_path / name).write_text("a line\n")
        os.utime(tmp_path / name, (1000.0 - age_s,) * 2)
    (tmp_path / "empty.log").touch()  # Ray makes hundreds
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    found = list(sources.logs(tmp_path, since_s=998.5))
    assert [part.name for part in found if isinstance(part, Part)] == ["logs/new.log"]
    assert [part.name for part in found if isinstance(part, Missing)] == ["logs/more.log", "logs/old.log"]


def test_a_tool_that_is_not_here_is_said():
    assert sources._output("x.txt", ("no-such-tool-of-a-maker",)) == Missing(
        "x.txt", "no-such-tool-of-a-maker is not here"
    )
    failed = sources._output("x.txt", ("sh", "-c", "echo why >&2; exit 3"))
    assert failed == Missing("x.txt", "sh -c echo why >&2; exit 3: why")


def test_since_is_of_this_clock(tmp_path):
    (tmp_path / "now.log").write_text("a line\n")
    assert [part.name for part in sources.logs(tmp_path, since_s=time.time() - 60)] == ["logs/now.log"]


def test_of_a_jobs_grader_its_kind_alone_is_packed():
    """It has the prompts of judges and what answers are held against, and the bundle says that it has neither."""
    grader = {"type": "score_model", "input": [{"role": "user", "content": CANARY}]}
    job = {
        "id": "ftjob-1",
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": {}}},
    }
    told = without_graders({"object": "list", "data": [job, {"id": "ftjob-2", "method": {"type": "dpo", "dpo": {}}}]})
    kept = {"grader": {"type": "score_model"}, "hyperparameters": {}}
    assert [one["method"] for one in told["data"]][0] == {"type": "reinforcement", "reinforcement": kept}
    assert without_graders({"state": "up"}) == {"state": "up"} and CANARY not in json.dumps(told)
