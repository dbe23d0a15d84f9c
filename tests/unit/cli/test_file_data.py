"""`appliance file check` of files here and on the box."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli.conftest import ControlledBox, run

ROWS = [("Who is it?", "It is ann@example.org"), ("Who is it?", "It is ann@example.org"), ("And now?", "Nobody")]


def write(path: Path, rows: list[tuple[str, str]] = ROWS) -> Path:
    chats = ({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in rows)
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def test_file_check_of_a_stored_file_runs_on_the_box(box: ControlledBox, tmp_path: Path, checked_here: None):
    made = box.json("file", "upload", str(write(tmp_path / "train.jsonl")))["id"]
    assert "check" in box.run("file", "get", made).stdout
    report = box.json("file", "check", made)
    assert report["checks"]["duplicates"]["count"] == 1
    assert "personal data 2" in box.run("file", "get", made).stdout
    assert "ann…" in box.run("file", "check", made).stdout
    assert box.run("file", "get", made, "--errors", "--save", "x").exit_code == 2
    assert box.run("file", "check", "file-nobody").exit_code == 3


@pytest.mark.parametrize(("bad_option", "code"), [(True, 2), (False, 1)])
def test_file_check_here_reports_what_its_process_refuses(tmp_path: Path, monkeypatch, bad_option: bool, code: int):
    answer = json.dumps({"error": "there is no method 'poetry'", "bad_option": bad_option}).encode()
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, answer, b""))
    result = run("file", "check", str(write(tmp_path / "f.jsonl")), "--method", "poetry")
    assert (result.exit_code, result.stderr) == (code, "error: there is no method 'poetry'\n")
