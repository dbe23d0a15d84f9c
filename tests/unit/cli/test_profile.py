"""`appliance profile job`: the table of a running job's steps, and what is said where there is none."""

from __future__ import annotations

import json
from typing import Any

from appliance.store.objects import jobs
from appliance.store.rows import JobRow
from tests.unit.cli.conftest import ControlledBox

SHARE = {"compute": 1.2, "communication": 0.4, "input": 0.0, "idle": 0.4}
OPERATOR = {"name": "aten::mm", "kind": "compute", "seconds": 1.0, "count": 12}
TOLD = {"event": "profiled", "step": 9, "steps": 3, "seconds": 2.0, "share": SHARE, "operators": [OPERATOR]}


def running(box: ControlledBox, *told: dict[str, Any]) -> str:
    """A job that tells this when it is asked for a profile."""
    row = JobRow("ftjob-1", "starter", "supervised", "file-1", 7, "ft:1", 1.0, phase="queued")

    def begin() -> None:
        jobs.insert(box.context.db, row)
        box.job_events.started(row.id, ["cpu0"], resumed=False)

    async def profile_job(job_id: str, steps: int) -> None:
        for event in told:
            box.job_events.ingest(job_id, event)

    box.do(begin)
    box.context.scheduler.profile_job = profile_job  # type: ignore[method-assign]
    return row.id


def test_a_table_of_where_the_time_went(box: ControlledBox):
    job_id = running(box, TOLD | {"trace": "/x/trace-9.json.gz", "bytes": 2_000_000})
    shown = box.run("profile", "job", job_id, "--steps", "3")
    assert shown.exit_code == 0, shown.output
    for word in ("communication", "20.0 %", "aten::mm", "profile/trace-9.json.gz"):
        assert word in shown.output
    again = box.json("profile", "job", job_id)
    assert again["share"] == SHARE and json.dumps(again["operators"]) == json.dumps([OPERATOR])


def test_a_profiler_that_fails_is_said(box: ControlledBox):
    job_id = running(
        box, {"event": "message", "level": "warn", "text": "The job could not be profiled and goes on: no"}
    )
    result = box.run("profile", "job", job_id)
    assert result.exit_code == 1 and "could not be profiled" in result.output
