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
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import StringConstraints

from appliance.controller.admin.owners.key_ends import end_key
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.files import storage as files
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import ADMIN, Caller, Principal, needs
from appliance.controller.jobs.wanted import ask
from appliance.controller.models import removal as models
from appliance.store.database import Database
from appliance.store.objects import files as file_rows
from appliance.store.objects import jobs
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


def routes(context: ControllerContext, router: APIRouter, evaluations: EvalRunner) -> None:
    """Add the routes to the admin router."""

    @router.get("/forget", dependencies=[Depends(needs(ADMIN))])  # it names an owner's keys
    def show(owner: Annotated[str, Query(min_length=1, max_length=256)]) -> dict[str, Any]:
        """What the box has of this owner. Changes nothing."""
        return {"owner": owner, "done": False, "waits_for": [], **_found(context.db, owner)}

    @router.post("/forget")
    async def forget(body: Forget, caller: Caller) -> dict[str, Any]:
        """`done` false: the work that `waits_for` names has not ended yet; ask again."""
        return await _forget(context, evaluations, body, caller)


async def _forget(
    context: ControllerContext, evaluations: EvalRunner, body: Forget, caller: Principal
) -> dict[str, Any]:
    """Ends an owner's work, deletes what is stored of it, and takes its name out of what stays. Raises Conflict if the
    owner's work goes on and may not be cancelled, or somebody uses one of its models."""
    db, owner = context.db, body.owner
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
    for name in doomed:
        models.refuse_if_in_use(context, models.doomed(context, name), caller, {*there["unfinished"], *doomed})
    for row in forgotten.keys_of(db, owner):
        end_key(context, row.id)
    context.spending.publish_keys()
    for job_id in forgotten.ids(db, "jobs", owner, forgotten.JOB_GOES_ON):
        ask(context, job_id, "cancel", caller)
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while (left := await asyncio.to_thread(forgotten.unfinished, db, owner)) and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_EVERY_S)
    if left:
        record(context, caller, "owner.forget", "", outcome="failed", waits_for=left)
        return {"owner": owner, "done": False, "waits_for": left, **there}
    for name in doomed:
        await models.remove(context, models.doomed(context, name), caller)
    for kind in ("eval_runs", "evals"):
        for one in forgotten.ids(db, kind, owner):
            await evaluations.delete(one)
    pseudonym = f"forgotten-{secrets.token_hex(4)}"
    await asyncio.to_thread(_delete, context, owner, pseudonym)
    context.spending.publish_keys()
    counted = {kind: there[kind] for kind in ("files", "uploads", "batches", "responses", "jobs", "evals")}
    record(context, caller, "owner.forget", pseudonym, keys=len(there["keys"]), models=len(doomed), **counted)
    await asyncio.to_thread(db.empty_log)  # what was deleted stands there until it is written over
    done = {"done": True, "waits_for": [], "pseudonym": pseudonym, "models_deleted": doomed}
    return {"owner": owner, **done, **there}


def _delete(context: ControllerContext, owner: str, pseudonym: str) -> None:
    """Delete the owner's bytes and rows, and rename what stays."""
    db = context.db
    job_ids, file_ids = forgotten.ids(db, "jobs", owner), forgotten.ids(db, "files", owner)
    for job_id in job_ids:
        file_ids += jobs.get(db, job_id).result_files
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        # W&B's files on the box have the job's name, its tags and its project.
        for run in (context.files_dir.parent / "tracking" / "wandb").glob(f"*run-*-{glob.escape(job_id)}-*"):
            shutil.rmtree(run, ignore_errors=True)
        retention.delete_texts_of_job(db, job_id)
    for file_id in file_ids:
        if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
            files.remove(context, row)
    for upload_id in forgotten.ids(db, "uploads", owner):
        shutil.rmtree(context.uploads_dir / upload_id, ignore_errors=True)
    forgotten.delete(db, owner)
    forgotten.rename(db, owner, pseudonym)


def _found(db: Database, owner: str) -> dict[str, Any]:
    counted = ("files", "uploads", "batches", "jobs", "evals", "responses")
    return {
        "keys": [row.name for row in forgotten.keys_of(db, owner)],
        "models": forgotten.models_made(db, owner),
        "unfinished": forgotten.unfinished(db, owner),
        **{kind: len(forgotten.ids(db, kind, owner)) for kind in counted},
    }
