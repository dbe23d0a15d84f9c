"""Applies retention: everything that grows with use has a number of days in `[controller.retention]`. All of it runs
on a thread of its own, in short transactions."""

from __future__ import annotations

import shutil
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.http.resource import IDEMPOTENCY_KEEP_S
from appliance.controller.jobs.phases import remove_copies
from appliance.store.database import Database
from appliance.store.objects import evals, files
from appliance.store.rows import UNFINISHED

DAY_S = 86400.0
_RECORDS = {
    # The newest stays however old: hand-overs are numbered on from it.
    "handovers": "ended_s < ?1 AND seq < (SELECT max(seq) FROM handovers)",
    "operations": "ended_s < ?1 AND state != 'running'",
    "batches": f"created_s < ?1 AND NOT {UNFINISHED['batches']}",
}
# Not jobs whose snapshot is still to be given back, or of whose models one is left (a version, under a name that jobs
# share). What their devices cost stays without them.
_JOB_GOES = (
    f"NOT {UNFINISHED['jobs']} AND snapshot IS NULL"
    " AND NOT EXISTS (SELECT 1 FROM models WHERE models.id = jobs.output_model AND (NOT jobs.stable_name"
    "  OR models.job_id = jobs.id OR EXISTS"
    "  (SELECT 1 FROM versions WHERE job_id = jobs.id)))"
)
_FILE_NEEDED = (
    f"(id IN (SELECT input_file_id FROM batches WHERE {UNFINISHED['batches']})"
    f" OR id IN (SELECT training_file FROM jobs WHERE {UNFINISHED['jobs']})"
    f" OR id IN (SELECT validation_file FROM jobs WHERE {UNFINISHED['jobs']}))"
)


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Delete expired files, requests that can no longer be repeated, and what was kept long enough."""
    db, kept = context.db, context.config.retention
    files_s, data_s, records_s, usage_s, audit_s = (
        float("-inf") if days is None else now_s - days * DAY_S
        for days in (kept.files_days, kept.job_data_days, kept.records_days, kept.usage_days, kept.audit_days)
    )
    for row in files.expired(db, now_s=now_s):
        storage.remove(context, row)
    # Without what nothing needs that has not ended.
    old = f"SELECT id FROM files WHERE created_s < ? AND NOT coalesce({_FILE_NEEDED}, 0)"
    for file_id in db.column(old, [files_s]):
        file = files.find(db, file_id, viewer=None, now_s=0)
        # A job may have begun with it meanwhile.
        if file is not None and db.value(f"SELECT 1 FROM files WHERE id = ? AND {_FILE_NEEDED}", [file_id]) is None:
            storage.remove(context, file)
    db.delete("idempotency", "created_s < ?", [now_s - IDEMPOTENCY_KEEP_S])
    db.delete("audit", "created_s < ?", [audit_s])
    db.delete("usage", "hour_s < ? - 3600", [usage_s])
    db.delete("device_time", "to_s < ?", [usage_s])
    delete_records(db, records_s)
    for run_id in db.column(
        f"SELECT id FROM eval_runs WHERE ended_s < ? AND NOT {UNFINISHED['eval_runs']}", [records_s]
    ):
        evals.delete(db, run_id)
    for job_id in db.column(f"SELECT id FROM jobs WHERE finished_s < ? AND {_JOB_GOES}", [records_s]):
        # The folder first: after a crash in between, the row leads here again.
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        for table in ("job_events", "job_metrics"):  # up to 100,000 rows each
            db.delete(table, "job_id = ?", [job_id])
        db.execute("DELETE FROM jobs WHERE id = ?", [job_id])
    for job_id in _with_folders(db, context.jobs_dir, now_s):
        remove_copies(context, job_id)
    for job_id in _with_folders(db, context.jobs_dir, data_s):
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)


def delete_records(db: Database, before_s: float) -> None:
    for table, where in _RECORDS.items():
        db.delete(table, where, [before_s])


def _with_folders(db: Database, jobs_dir: Path, before_s: float) -> list[str]:
    """Jobs that ended before this moment and have a folder."""
    folders = {entry.name for entry in jobs_dir.iterdir()}
    return [job_id for job_id in db.column("SELECT id FROM jobs WHERE finished_s < ?", [before_s]) if job_id in folders]
