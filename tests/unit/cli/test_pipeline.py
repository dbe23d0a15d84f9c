"""`appliance pipeline`: a file becomes a pipeline of the box, and its runs are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.store.objects import pipelines
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import chat_lines


@pytest.fixture
def nightly(box: ControlledBox, tmp_path: Path) -> str:
    data = tmp_path / "train.jsonl"
    data.write_bytes(chat_lines())
    file_id = box.json("file", "upload", str(data))["id"]
    path = tmp_path / "nightly.toml"
    lines = [
        'name = "nightly"',
        f'data.file = "{file_id}"',
        'train.model = "starter"',
        'train.publish_as = "fraud"',
        "train.hyperparameters = {n_epochs = 1}",
        'schedule.cron = "0 2 * * *"',
        'schedule.tz = "Europe/Berlin"',
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_a_file_is_run_listed_scheduled_and_its_run_cancelled(box: ControlledBox, nightly: str):
    assert "no pipelines" in box.run("pipeline", "list").stdout
    run_id = box.json("pipeline", "run", nightly)["id"]
    late = box.run("pipeline", "run", "nightly")
    assert late.exit_code == 5 and run_id in late.stderr, "one at a time"
    waited = box.run("pipeline", "show", run_id)
    assert "train" in waited.stdout and "running" in waited.stdout
    told = box.run("pipeline", "schedule", nightly).stdout
    assert 'nightly: at "0 2 * * *" Europe/Berlin, next ' in told
    assert "nightly" in box.run("pipeline", "list").stdout
    assert run_id in box.run("pipeline", "show", "nightly").stdout
    assert box.run("pipeline", "schedule", "nightly", "--off").stdout.strip() == "nightly: when asked"
    assert box.run("pipeline", "cancel", run_id).stdout.strip() == f"{run_id}: cancelled"
    assert box.run("pipeline", "rm", "nightly").exit_code == 0
    assert box.run("pipeline", "show", "nightly").exit_code == 3


def test_a_run_is_followed_to_its_end(box: ControlledBox, nightly: str, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n')
    file_id = _sent(box, bad)
    text = Path(nightly).read_text()
    Path(nightly).write_text(text.replace(text.split('"')[3], file_id))
    done = box.run("pipeline", "run", nightly, "--wait")
    assert done.exit_code == 1 and "line 1" in done.stderr and "check failed" in done.stderr
    assert "failed" in done.stdout


def _sent(box: ControlledBox, path: Path) -> str:
    """The id of a file whose upload the command reports as bad."""
    box.run("file", "upload", str(path))
    return str(box.json("file", "list")["data"][0]["id"])


def test_what_is_no_file_is_said(box: ControlledBox, tmp_path: Path):
    assert "not a file on this machine" in box.run("pipeline", "run", str(tmp_path / "none.toml")).stderr
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    assert "not TOML" in box.run("pipeline", "run", str(broken)).stderr
    assert box.do(lambda: pipelines.page(box.context.db, viewer=None, after=None, limit=1).data) == []
