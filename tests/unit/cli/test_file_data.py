"""`appliance file check` of files here and on the box."""

import json
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
    report = box.json("file", "check", made)
    assert report["checks"]["duplicates"]["count"] == 1
    assert "ann…" in box.run("file", "check", made).stdout
    assert box.run("file", "get", made, "--errors", "--save", "x").exit_code == 2
    assert box.run("file", "check", "file-nobody").exit_code == 3


@pytest.mark.parametrize(
    ("options", "shown", "code"),
    [
        (("--method", "poetry"), "poetry", 2),
        (("--model", "nowhere"), "no tokenizer", 2),
        (("--against", "nowhere.jsonl"), "nowhere.jsonl", 1),
    ],
)
def test_local_file_check_refuses_wrong_arguments(tmp_path: Path, options: tuple[str, str], shown: str, code: int):
    result = run("file", "check", str(write(tmp_path / "f.jsonl")), *options)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1) and shown in result.stderr


def test_file_check_of_a_path_without_a_file_names_it():
    result = run("file", "check", "data/nowhere.jsonl")
    assert (result.exit_code, result.stderr) == (1, "error: data/nowhere.jsonl: No such file or directory\n")
