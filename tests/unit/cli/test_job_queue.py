"""`appliance job queue|update|hold|release` and the options of `job submit` about devices."""

from __future__ import annotations

import time

import pytest

from appliance.store.objects import jobs
from tests.unit.cli.conftest import ControlledBox
from tests.unit.cli.test_tables_and_json import lines, make_job


def test_a_job_is_submitted_with_bounds_shown_in_the_queue_held_and_changed(box: ControlledBox, tmp_path):
    job_id = make_job(
        box, tmp_path, "--priority", "3", "--sizes", "2,4", "--deadline", "8h", "--no-preemptible", "--batch-size", "8"
    )
    row = box.do(lambda: jobs.get(box.context.db, job_id))
    assert (row.priority, row.asked_sizes, row.preemptible, row.held) == (3, [2, 4], 0, 0)
    assert 7.9 * 3600 < row.deadline_s - time.time() <= 8 * 3600
    (entry,) = box.json("job", "queue")["data"]
    assert set(entry) == {
        "position",
        "id",
        "owner",
        "priority",
        "phase",
        "devices",
        "min_devices",
        "max_devices",
        "allowed_sizes",
        "preemptible",
        "deadline_s",
        "held",
        "reason",
        "message",
        "created_s",
    }
    told = lines(box.run("job", "queue").stdout)
    assert told[0] == ["#", "JOB", "OWNER", "PRIORITY", "PHASE", "DEVICES", "MAY", "USE", "DEADLINE", "REASON"]
    assert told[1][:7] == ["1", job_id, "-", "3", "queued", "0", "2,4"]
    assert box.run("job", "hold", job_id).stdout.strip() == f"{job_id} is held"
    assert box.json("job", "release", job_id)["held"] is False
    said = box.run("job", "update", job_id, "--priority", "9", "--deadline", "none", "--sizes", "none")
    assert said.stdout.strip() == f"{job_id}: changed allowed_sizes, deadline_s, priority"
    assert box.json("job", "get", job_id)["allowed_sizes"] == [1, 2, 4, 8]
    assert box.run("job", "update", job_id).exit_code == 2
    assert box.run("job", "update", "ftjob-none", "--priority", "1").exit_code == 3


@pytest.mark.parametrize("options", [["--sizes", "2,x"], ["--sizes", "0"], ["--deadline", "soon"]])
def test_what_is_no_size_or_no_time(box: ControlledBox, options: list[str]):
    assert box.run("job", "update", "ftjob-1", *options).exit_code == 2


def test_an_empty_queue(box: ControlledBox):
    assert box.run("job", "queue").stdout.strip() == "no job waits or runs"


def test_keys_have_owners(box: ControlledBox):
    assert box.json("key", "create", "--name", "laptop", "--owner", "alice")["owner"] == "alice"
    assert lines(box.run("key", "list").stdout)[1][1:3] == ["laptop", "alice"]
