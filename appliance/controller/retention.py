"""Applies retention: everything that grows with use has a number of days in `[controller.retention]`. All of it runs
on a thread of its own, in short transactions."""

from __future__ import annotations

import shutil
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.jobs.validation import remove_copies
from appliance.store.database import Database
from appliance.store.objects import evals, files
from appliance.store.rows import UNFINISHED

DAY_S = 86400.0
_OF_ENDED_JOB = "job_id IN (SELECT id FROM jobs WHERE finished_s < ?1)"
_AGED = {
    "audit": ("audit_days", "created_s < ?1"),
    # The newest stays however old: hand-overs are numbered on from it.
    "handovers": ("handovers_days", "ended_s < ?1 AND seq < (SELECT max(seq) FROM handovers)"),
    "operations": ("operations_days", "ended_s < ?1 AND state != 'running'"),
    "device_time": ("usage_days", "to_s < ?1"),
    "batches": ("batches_days", f"created_s < ?1 AND NOT {UNFINISHED['batches']}"),
    "usage": ("usage_days", "hour_s < ?1 - 3600"),
    "job_events": ("job_events_days", _OF_ENDED_JOB),
    "job_metrics": ("job_events_days", _OF_ENDED_JOB),
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
    db, config = context.db, context.config

    def before_s(setting: str) -> float:
        """-inf: it is kept for ever."""
        days: float | None = getattr(config.retention, setting)
        return float("-inf") if days is None else now_s - days * DAY_S

    for row in files.expired(db, now_s=now_s):
        storage.remove(context, row)
    db.delete("idempotency", "created_s < ?", [now_s - config.idempotency_keep_s])
    for table, (setting, _) in _AGED.items():
        delete_aged(db, table, before_s(setting))
    for job_id in db.column(f"SELECT id FROM jobs WHERE finished_s < ? AND {_JOB_GOES}", [before_s("jobs_days")]):
        # The folder first: after a crash in between, the row leads here again.
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        delete_job(db, job_id)
    for run_id in eval_runs_before(db, before_s("eval_runs_days")):
        evals.delete(db, run_id)
    # Without what nothing needs that has not ended.
    old = f"SELECT id FROM files WHERE created_s < ? AND NOT coalesce({_FILE_NEEDED}, 0)"
    for file_id in db.column(old, [before_s("files_days")]):
        file = files.find(db, file_id, viewer=None, now_s=0)
        if file is not None and db.value(f"SELECT 1 FROM files WHERE id = ? AND {_FILE_NEEDED}", [file_id]) is None:
            storage.remove(context, file)
    for job_id in _with_folders(db, context.jobs_dir, now_s):
        remove_copies(context, job_id)
    for job_id in _with_folders(db, context.jobs_dir, before_s("job_data_days")):
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)


def delete_aged(db: Database, table: str, before_s: float) -> None:
    db.delete(table, _AGED[table][1], [before_s])


def eval_runs_before(db: Database, before_s: float) -> list[str]:
    return db.column(f"SELECT id FROM eval_runs WHERE ended_s < ? AND NOT {UNFINISHED['eval_runs']}", [before_s])


def delete_job(db: Database, job_id: str) -> None:
    """Delete an ended job with what belongs to it: up to 100,000 events and steps each."""
    for table in ("job_events", "job_metrics"):
        db.delete(table, "job_id = ?", [job_id])
    db.execute("DELETE FROM jobs WHERE id = ?", [job_id])


def _with_folders(db: Database, jobs_dir: Path, before_s: float) -> list[str]:
    """Jobs that ended before this moment and have a folder."""
    folders = {entry.name for entry in jobs_dir.iterdir()}
    return [job_id for job_id in db.column("SELECT id FROM jobs WHERE finished_s < ?", [before_s]) if job_id in folders]
