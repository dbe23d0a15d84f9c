"""/admin/v1/forget: deletes the data of a person who leaves.

Deleted: files, uploads, stored responses, batches, job folders and events. Kept without the name: usage, the audit log,
jobs. Revoked: the keys. Models that were trained on their files are listed, and deleted only on request. Repeating the
request continues where the last one stopped.
"""

from __future__ import annotations

import asyncio
import glob
import secrets
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query
from pydantic import StringConstraints

from appliance.controller.admin.owners.first_key import drop_first_key
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.files import storage as files
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, InvalidValue
from appliance.controller.interfaces.principal import ADMIN, Caller, Principal, needs
from appliance.controller.jobs.wanted import ask
from appliance.controller.models import removal as models
from appliance.store.database import Database
from appliance.store.objects import files as file_rows
from appliance.store.objects import jobs
from appliance.store.records import keys
from appliance.store.records.session_keys import OWNER as BOX_ITSELF
from appliance.store.upkeep import forgotten, retention

ENDS_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.05
_SHOWN = 10


class Forget(StrictBody):
    """owner: as in keys. cancel: cancel unfinished work; without it, unfinished work makes the request fail.
    models: also delete those trained on the owner's files."""

    owner: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    cancel: bool = False
    models: bool = False


def routes(context: ControllerContext, router: APIRouter, forgetting: Forgetting) -> None:
    """Add the routes to the admin router."""

    @router.get("/forget", dependencies=[Depends(needs(ADMIN))])  # it names an owner's keys
    def show(owner: Annotated[str, Query(min_length=1, max_length=256)]) -> dict[str, Any]:
        """What the box has of this owner. Changes nothing."""
        return {"owner": owner, "done": False, "waits_for": [], **_found(context.db, owner)}

    @router.post("/forget")
    async def forget(body: Forget, caller: Caller) -> dict[str, Any]:
        """`done` false: the work that `waits_for` names has not ended yet; ask again."""
        if body.owner == BOX_ITSELF:
            raise InvalidValue("The box itself cannot be forgotten.", "owner")
        return await forgetting.forget(body, caller)


class Forgetting:
    """Ends an owner's work, deletes what is stored of it, and takes its name out of what stays."""

    def __init__(self, context: ControllerContext, evaluations: EvalRunner):
        self._context, self._db, self._evaluations = context, context.db, evaluations

    async def forget(self, body: Forget, caller: Principal) -> dict[str, Any]:
        """Raises Conflict if the owner's work goes on and may not be cancelled, or somebody uses one of its models."""
        context, db, owner = self._context, self._db, body.owner
        there = await asyncio.to_thread(_found, db, owner)
        if there["unfinished"] and not body.cancel:
            raise Conflict(
                f"{len(there['unfinished'])} jobs, batches or responses of this owner have not ended: "
                f"{', '.join(there['unfinished'][:_SHOWN])}. Wait for their end, or ask with cancel (`--cancel`).",
                param="owner",
                code="owner_busy",
            )
        # Newest first: an adapter goes before its base.
        doomed = there["models"][::-1] if body.models else []
        # Before the first change: a model that somebody else uses would stop the request halfway.
        leaving = {*there["unfinished"], *doomed}
        for name in doomed:
            models.refuse_if_in_use(context, models.doomed(context, name), caller, leaving)
        for row in forgotten.keys_of(db, owner):
            drop_first_key(context, keys.revoke(db, row.id))
        context.spending.publish_keys()
        if left := await self._end_work(owner, caller):
            record(context, caller, "owner.forget", "", outcome="failed", waits_for=left)
            return {"owner": owner, "done": False, "waits_for": left, **there}
        for name in doomed:
            await models.remove(context, models.doomed(context, name), caller)
        await self._delete(owner)
        pseudonym = f"forgotten-{secrets.token_hex(4)}"
        await asyncio.to_thread(forgotten.rename, db, owner, pseudonym)
        context.spending.publish_keys()
        counted = {kind: there[kind] for kind in ("files", "uploads", "batches", "responses", "jobs", "evals")}
        record(context, caller, "owner.forget", pseudonym, keys=len(there["keys"]), models=len(doomed), **counted)
        await asyncio.to_thread(db.empty_log)  # what was deleted stands there until it is written over
        return {
            "owner": owner,
            "done": True,
            "waits_for": [],
            "pseudonym": pseudonym,
            "models_deleted": doomed,
            **there,
        }

    async def _end_work(self, owner: str, caller: Principal) -> list[str]:
        """End unfinished work and wait for it briefly; returns what has not ended by then."""
        context, db = self._context, self._db
        for job_id in forgotten.ids(db, "jobs", owner, forgotten.JOB_GOES_ON):
            if (job := jobs.find(db, job_id)) is not None and not job.finished:
                ask(context, job.id, "cancel", caller)
        for key in forgotten.keys_of(db, owner):  # which are revoked
            context.tasks.end_key(key.id)
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while (left := await asyncio.to_thread(forgotten.unfinished, db, owner)) and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        return left

    async def _delete(self, owner: str) -> None:
        context, db = self._context, self._db
        for job_id in forgotten.ids(db, "jobs", owner):
            job = jobs.find(db, job_id)
            for file_id in job.result_files if job is not None else ():
                if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
                    files.remove(context, row)
            await to_thread.run_sync(shutil.rmtree, context.jobs_dir / job_id, True)
            await to_thread.run_sync(_delete_of_trackers, context.files_dir.parent / "tracking", job_id)
            await asyncio.to_thread(retention.delete_texts_of_job, db, job_id)
        for file_id in forgotten.ids(db, "files", owner):
            if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
                files.remove(context, row)
        for upload_id in forgotten.ids(db, "uploads", owner):
            await to_thread.run_sync(shutil.rmtree, context.uploads_dir / upload_id, True)
        gone = [one for table in ("eval_runs", "evals") for one in forgotten.ids(db, table, owner)]
        for one in gone:
            await self._evaluations.delete(one)
        await asyncio.to_thread(forgotten.delete, db, owner)


def _found(db: Database, owner: str) -> dict[str, Any]:
    counted = ("files", "uploads", "batches", "jobs", "evals", "responses")
    return {
        "keys": [row.name for row in forgotten.keys_of(db, owner)],
        "models": forgotten.models_made(db, owner),
        "unfinished": forgotten.unfinished(db, owner),
        **{kind: len(forgotten.ids(db, kind, owner)) for kind in counted},
    }


def _delete_of_trackers(folder: Path, job_id: str) -> None:
    """The files of a job's runs that W&B keeps on the box: they have the job's name, its tags and its project."""
    for run in (folder / "wandb").glob(f"*run-*-{glob.escape(job_id)}-*"):
        shutil.rmtree(run, ignore_errors=True)
