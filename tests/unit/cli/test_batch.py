"""`appliance batch`: create with --wait, list, show, cancel."""

from __future__ import annotations

import json

from tests.unit.cli.conftest import ControlledBox


def write(tmp_path, *numbers: int):
    path = tmp_path / "requests.jsonl"
    body = {"model": "starter", "messages": [{"role": "user", "content": "hi"}]}
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_batch_is_made_waited_for_and_shown(box: ControlledBox, tmp_path):
    made = box.json("batch", "create", write(tmp_path, 1, 2, 3), "--wait")
    assert made["status"] == "completed" and made["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert "3 answered, 0 failed of 3" in box.run("batch", "show", made["id"]).stdout
    assert made["id"] in box.run("batch", "list").stdout
    cancelled = box.run("batch", "cancel", made["id"])
    assert cancelled.exit_code != 0 and "status 'completed'" in cancelled.output


def test_a_bad_file_is_told_line_by_line(box: ControlledBox, tmp_path):
    refused = box.run("batch", "create", write(tmp_path, 1, 1), "--wait")
    assert refused.exit_code == 1 and "line 2: The custom_id 'r1' is used twice" in refused.output
    assert box.run("batch", "show", "batch_none").exit_code == 3


def test_many_bad_lines_are_shown_once_with_how_many_are_left_out(box: ControlledBox, tmp_path):
    refused = box.run("batch", "create", write(tmp_path, *[1] * 31), "--wait")
    assert refused.stdout.count("is used twice") == 20 and "10 more; -o json has them" in refused.stdout
    assert refused.stderr.count("is used twice") == 1 and "(and 29 more)" in refused.stderr
