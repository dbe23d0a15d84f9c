"""Applies retention: everything that grows with use has a number of days in `[controller.retention]`. All of it runs
on a thread of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.jobs.validation import remove_copies
from appliance.store.database import Database
from appliance.store.objects import evals, files, idempotency, jobs
from appliance.store.upkeep import retention

DAY_S = 86400.0


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Delete expired files, requests that can no longer be repeated, and what was kept long enough."""
    db, config, kept = context.db, context.config, context.config.retention
    for row in files.expired(db, now_s=now_s):
        storage.remove(context, row)
    keyless_s = min(config.retry_window_s, config.idempotency_keep_s)
    idempotency.delete_before(db, now_s - config.idempotency_keep_s, now_s - keyless_s)
    for days, tables in (
        (kept.audit_days, ("audit",)),
        (kept.usage_days, ("usage", "device_time")),
        (kept.handovers_days, ("handovers",)),
        (kept.operations_days, ("operations",)),
        (kept.batches_days, ("batches",)),
        (kept.job_events_days, ("job_events", "job_metrics")),
    ):
        for table in tables if days is not None else ():
            retention.delete_aged(db, table, now_s - days * DAY_S)
    for job_id in retention.jobs_before(db, now_s - kept.jobs_days * DAY_S) if kept.jobs_days is not None else ():
        # The folder first: after a crash in between, the row leads here again.
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        retention.delete_job(db, job_id)
    if kept.eval_runs_days is not None:
        for run_id in retention.eval_runs_before(db, now_s - kept.eval_runs_days * DAY_S):
            evals.delete(db, run_id)
    if kept.files_days is not None:
        for file_id in retention.old_files(db, now_s - kept.files_days * DAY_S):
            row = files.find(db, file_id, viewer=None, now_s=0)
            if row is not None and not retention.is_needed(db, file_id):  # since it was found
                storage.remove(context, row)
    for job_id in _with_folders(db, context.jobs_dir, now_s):
        remove_copies(context, job_id)
    if kept.job_data_days is not None:
        for job_id in _with_folders(db, context.jobs_dir, now_s - kept.job_data_days * DAY_S):
            shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)


def _with_folders(db: Database, jobs_dir: Path, before_s: float) -> list[str]:
    """Jobs that ended before this moment and have a folder."""
    return [entry.name for entry in jobs_dir.iterdir() if jobs.has_ended(db, entry.name, before_s)]
