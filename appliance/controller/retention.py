"""Applies retention: everything that grows with use has a number of days, or a number per owner, in
`[controller.retention]`.

Housekeeping deletes in chunks, each in its own transaction with the loop free in between, so that deleting a year of
audit rows blocks nobody.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import to_thread

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.interfaces.config import RetentionSettings
from appliance.controller.interfaces.identity import ADMIN, GATEWAY
from appliance.controller.jobs import data
from appliance.store.chunks import little_by_little
from appliance.store.database import BOX, Database
from appliance.store.objects import evals, files, jobs
from appliance.store.records import keys
from appliance.store.upkeep import retention

T = TypeVar("T")
DAY_S = 86400.0
CHUNK = 200
_FEW_LONG = 4  # graders of 2 MiB, terms of half a one
# Per round: the rest is deleted in the next one.
MAX_CHUNKS = 200


def _rules(kept: RetentionSettings) -> Iterator[tuple[float, retention.Drop]]:
    for days, drops in (
        (kept.audit_days, (retention.audit,)),
        (kept.usage_days, (retention.usage, retention.device_time, retention.energy)),
        (kept.handovers_days, (retention.handovers,)),
        (kept.operations_days, (retention.operations,)),
        (kept.batches_days, (retention.batches,)),
        (kept.eval_runs_days, (retention.eval_runs,)),
    ):
        if days is not None:
            yield from ((days, drop) for drop in drops)


async def keep_house(context: ControllerContext, now_s: float) -> None:
    """One round of retention."""
    await _Round(context, now_s).go()


class _Round:
    """What is looked for is found on a thread of the store's, and deleted on the loop by what it is called."""

    def __init__(self, context: ControllerContext, now_s: float):
        self._context, self._db, self._now_s = context, context.db, now_s
        self._kept, self._left = context.config.retention, MAX_CHUNKS

    async def go(self) -> None:
        await self._by_age()
        await self._by_number()
        await little_by_little(partial(evals.delete_some, self._db))
        await self._files()
        await self._folders()

    async def _read(self, find: Callable[..., T], *asked: Any) -> T:
        return await self._db.read(BOX, find, self._db, *asked)

    async def _past(self, find: Callable[..., list[T]], drop: Callable[[list[T]], None], *asked: Any) -> None:
        """asked: of `find`, with how many at most at its end."""
        while self._left and (found := await self._read(find, *asked)):
            drop(found)
            self._left -= 1
            if len(found) < asked[-1]:
                return

    async def _by_age(self) -> None:
        for days, drop in _rules(self._kept):
            while self._left and drop(self._db, self._now_s - days * DAY_S, CHUNK) == CHUNK:
                self._left -= 1
                await asyncio.sleep(0)
        if self._kept.job_events_days is None:
            return
        before_s = self._now_s - self._kept.job_events_days * DAY_S
        for table in ("job_events", "job_metrics"):
            for job_id in await self._read(retention.jobs_with_records, table, before_s, MAX_CHUNKS):
                while self._left and retention.delete_records(self._db, table, job_id, CHUNK) == CHUNK:
                    self._left -= 1
                    await asyncio.sleep(0)

    async def _by_number(self) -> None:
        db, kept = self._db, self._kept
        for owner in await self._read(retention.owners, "batches"):
            drop = partial(retention.delete_rows, db, "batches")
            await self._past(retention.batches_past, drop, owner, kept.batches_per_owner, CHUNK)
        for owner in await self._read(retention.owners, "eval_runs"):
            going = partial(evals.delete, db)
            await self._past(retention.eval_runs_past, going, owner, kept.eval_runs_per_owner, CHUNK)
        # An admin's audit trail has no limit: nobody should be able to push out their own earlier actions.
        bounded = [key.id for key in await self._read(keys.list_all) if ADMIN not in key.scopes]
        # GATEWAY: logins that were refused have no key, and a provider's people may ask for them without end.
        for key_id in [*bounded, GATEWAY]:
            drop = partial(retention.delete_rows, db, "audit")
            await self._past(retention.audit_past, drop, key_id, kept.audit_rows_per_key, CHUNK)
        for owner in await self._read(retention.owners, "jobs"):
            graders = partial(retention.delete_graders, db)
            await self._past(retention.graders_past, graders, owner, kept.graders_per_owner, _FEW_LONG)
            await self._delete_jobs(await self._read(retention.jobs_past, owner, kept.jobs_per_owner, CHUNK))
        if kept.jobs_days is not None:
            before_s = self._now_s - kept.jobs_days * DAY_S
            await self._delete_jobs(await self._read(retention.jobs_before, before_s, CHUNK))
        for job_id in await self._read(jobs.unfinished_ids):
            drop = partial(retention.delete_rows, db, "job_events")
            await self._past(retention.events_past, drop, job_id, kept.events_per_job, CHUNK)

    async def _delete_jobs(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            # The folder first: after a crash in between, the row leads here again.
            folder = self._context.jobs_dir / job_id
            await to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
            await little_by_little(partial(retention.delete_some_of_job, self._db, job_id))

    async def _files(self) -> None:
        if self._kept.files_days is None:
            return
        for file_id in await self._read(retention.old_files, self._now_s - self._kept.files_days * DAY_S, CHUNK):
            row = await self._db.read(BOX, files.find, self._db, file_id, viewer=None, now_s=0)
            if row is not None and not retention.is_needed(self._db, file_id):  # since it was found
                storage.remove(self._context, row)

    async def _folders(self) -> None:
        context, days = self._context, self._kept.job_data_days
        for job_id in await self._read(_with_folders, context.jobs_dir, self._now_s):
            await to_thread.run_sync(data.remove, context, job_id)
        if days is not None:
            for job_id in await self._read(_with_folders, context.jobs_dir, self._now_s - days * DAY_S):
                await to_thread.run_sync(shutil.rmtree, context.jobs_dir / job_id, True)


def _with_folders(db: Database, jobs_dir: Path, before_s: float) -> list[str]:
    """Jobs that ended before this moment and have a folder."""
    return [entry.name for entry in jobs_dir.iterdir() if jobs.has_ended(db, entry.name, before_s)]
