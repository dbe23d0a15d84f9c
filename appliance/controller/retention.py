"""Applies retention: everything that grows with use has a number of days, or a number per owner, in
`[controller.retention]`.

Housekeeping deletes in chunks, each in its own transaction with the loop free in between, so that deleting a year of
audit rows blocks nobody.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial

from anyio import to_thread

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.interfaces.config import RetentionSettings
from appliance.controller.interfaces.identity import ADMIN
from appliance.controller.jobs import data
from appliance.store.chunks import little_by_little
from appliance.store.objects import evals, jobs
from appliance.store.objects import files as file_rows
from appliance.store.records import keys
from appliance.store.upkeep import retention

DAY_S = 86400.0
CHUNK = 200
_FEW_LONG = 4  # graders of 2 MiB, terms of half a one
# Per round: the rest is deleted in the next one.
MAX_CHUNKS = 200


def _rules(kept: RetentionSettings) -> Iterator[tuple[float, retention.Drop]]:
    for days, drops in (
        (kept.audit_days, (retention.audit,)),
        (kept.usage_days, (retention.usage, retention.device_time)),
        (kept.job_events_days, (retention.job_records,)),
        (kept.handovers_days, (retention.handovers,)),
        (kept.operations_days, (retention.operations,)),
        (kept.batches_days, (retention.batches,)),
        (kept.eval_runs_days, (retention.eval_runs,)),
    ):
        if days is not None:
            yield from ((days, drop) for drop in drops)


async def keep_house(context: ControllerContext, now_s: float) -> None:
    """One round."""
    db, kept, left = context.db, context.config.retention, MAX_CHUNKS
    for days, drop in _rules(kept):
        while left and drop(db, now_s - days * DAY_S, CHUNK) == CHUNK:
            left -= 1
            await asyncio.sleep(0)
    for owner in retention.owners(db, "batches"):
        while left and retention.batches_past(db, owner, kept.batches_per_owner, CHUNK) == CHUNK:
            left -= 1
            await asyncio.sleep(0)
    for owner in retention.owners(db, "eval_runs"):
        retention.eval_runs_past(db, owner, kept.eval_runs_per_owner)
    await little_by_little(partial(evals.delete_some, db))
    for key in keys.list_all(db):
        # An admin's audit trail has no limit: nobody should be able to push out their own earlier actions.
        while ADMIN not in key.scopes and left and retention.audit_past(db, key.id, kept.audit_rows_per_key, CHUNK):
            left -= 1
            await asyncio.sleep(0)
    for owner in retention.owners(db, "jobs"):
        for shorten, keep in (
            (retention.graders_past, kept.graders_per_owner),
            (retention.gate_terms_past, kept.gate_terms_per_owner),
        ):
            while left and shorten(db, owner, keep, _FEW_LONG) == _FEW_LONG:
                left -= 1
                await asyncio.sleep(0)
        for job_id in retention.jobs_past(db, owner, kept.jobs_per_owner, CHUNK):
            # The folder first: after a crash in between, the row leads here again.
            await to_thread.run_sync(partial(shutil.rmtree, context.jobs_dir / job_id, ignore_errors=True))
            await little_by_little(partial(retention.delete_some_of_job, db, job_id))
    for row in jobs.list_unfinished(db):
        while left and retention.events_past(db, row.id, kept.events_per_job, CHUNK):
            left -= 1
            await asyncio.sleep(0)
    if kept.files_days is not None:
        for file_id in retention.old_files(db, now_s - kept.files_days * DAY_S, CHUNK):
            if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
                storage.remove(context, row)
            await asyncio.sleep(0)
    there = {entry.name for entry in context.jobs_dir.iterdir()}
    for job_id in there.intersection(retention.ended_jobs(db, now_s)):
        data.remove(context, job_id)
    if kept.job_data_days is not None:
        for job_id in there.intersection(retention.ended_jobs(db, now_s - kept.job_data_days * DAY_S)):
            await to_thread.run_sync(shutil.rmtree, context.jobs_dir / job_id, True)
