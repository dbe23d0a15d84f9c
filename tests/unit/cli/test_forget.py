"""`appliance forget` asks, waits for what has to end, and says what was deleted and what was kept."""

from __future__ import annotations

from appliance.store.objects import models
from appliance.store.records import keys
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import chat_lines


def test_a_person_is_forgotten(box: ControlledBox, tmp_path):
    box.run("key", "create", "--name", "ann")
    training = tmp_path / "train.jsonl"
    training.write_bytes(chat_lines())
    sent = box.json("file", "upload", str(training))
    box.do(lambda: box.context.db.execute("UPDATE files SET key_id = (SELECT id FROM keys WHERE name = 'ann')"))
    job = box.json("job", "submit", "--model", "starter", "--file", sent["id"])
    box.do(lambda: models.update(box.context.db, "starter", job_id=job["id"]))

    unasked = box.run("forget", "--owner", "ann")
    assert unasked.exit_code == 2 and "--yes" in unasked.output  # nobody at a terminal
    assert box.do(lambda: keys.list_live(box.context.db)) != []
    done = box.run("forget", "--owner", "ann", "--yes")
    assert done.exit_code == 0, done.output
    assert "1 files" in done.stdout and "keys: ann" in done.stdout
    assert "models trained on their files (kept; --models deletes them): starter" in done.stdout
    assert box.do(lambda: keys.list_live(box.context.db)) == [] and list(box.context.files_dir.iterdir()) == []
    assert box.json("forget", "--owner", "ann", "--yes")["files"] == 0
    wrong = box.run("forget", "--owner", "anna", "--yes")
    assert wrong.exit_code == 0 and "nothing here is of this owner: is the name right?" in wrong.stdout
    assert "forgotten:" not in wrong.stdout, "it looked like done"


def test_what_has_not_ended_is_named(prepared):
    answers = [
        (
            200,
            {
                "done": done,
                "waits_for": ["ftjob-1"],
                "keys": [],
                "unfinished": ["ftjob-1"],
                "models": [],
                "files": 0,
                "uploads": 0,
                "batches": 0,
                "responses": 0,
                "jobs": 1,
            },
        )
        for done in (False, True)
    ]
    prepared.prepare("POST", "/admin/v1/forget", *answers)
    result = prepared.run("forget", "--owner", "ann", "--cancel", "--yes")
    assert result.exit_code == 0 and "waiting for the end of ftjob-1" in result.stderr
    assert "cancelled: ftjob-1" in result.stdout and len(prepared.requests) == 2
