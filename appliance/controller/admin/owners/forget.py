"""/admin/v1/forget: deletes the data of a person who leaves.

Deleted: files, uploads, stored responses, batches, job folders and events. Kept without the name: usage, the audit log,
jobs. Revoked: the keys. Models that were trained on their files are listed, and deleted only on request.
Where the name stands as a part of other texts (a model that is kept, another's key), `mentions` says.
Repeating the request continues where the last one stopped; when all is done, nothing has that name any more.
"""

from __future__ import annotations

import asyncio
import glob
import re
import secrets
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query
from pydantic import StringConstraints

from appliance import backup_copies
from appliance.controller.batches.background_responses import BackgroundResponses
from appliance.controller.batches.runner import BatchRunner
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.files import storage as files
from appliance.controller.gates.runner import GateRunner
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, InvalidValue
from appliance.controller.interfaces.principal import ADMIN, Caller, Principal, needs
from appliance.controller.jobs.wanted import ask
from appliance.controller.models import removal as models
from appliance.controller.pipelines.runner import PipelineRunner
from appliance.controller.sweeps.runner import SweepRunner
from appliance.store import write_log
from appliance.store.chunks import little_by_little
from appliance.store.objects import batches, evals, jobs, responses, sweeps
from appliance.store.objects import files as file_rows
from appliance.store.records import keys
from appliance.store.records.session_keys import OWNER as BOX_ITSELF
from appliance.store.upkeep import forgotten, retention

ENDS_WITHIN_S = LOG_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.05
_SHOWN = 10
_MENTIONED = 100
_LOG_PIECE = 256 << 10
_LOG_STANDS = "the database's log (appliance.db-wal): others read from it all the while, or the disk is full; ask again"


class Forget(StrictBody):
    """owner: as in keys. cancel: cancel unfinished work; without it, unfinished work makes the request fail.
    models: also delete those trained on the owner's files."""

    owner: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    cancel: bool = False
    models: bool = False


def routes(
    context: ControllerContext,
    router: APIRouter,
    runner: BatchRunner,
    background: BackgroundResponses,
    evaluations: EvalRunner,
    judging: GateRunner,
    pipelining: PipelineRunner,
    sweeping: SweepRunner,
) -> None:
    """Add the routes to the admin router."""
    db = context.db

    def found(owner: str) -> dict[str, Any]:
        return {
            "keys": [row.name for row in forgotten.keys_of(db, owner)],
            "models": forgotten.models_made(db, owner),
            "unfinished": forgotten.unfinished(db, owner),
            **{kind: len(forgotten.ids(db, kind, owner)) for kind in ("files", "uploads", "batches", "jobs", "evals")},
            "responses": len(forgotten.ids(db, "responses", owner)),
        }

    @router.get("/forget", dependencies=[Depends(needs(ADMIN))])  # it names an owner's keys
    def show(owner: Annotated[str, Query(min_length=1, max_length=256)]) -> dict[str, Any]:
        """What the box has of this owner. Changes nothing."""
        return {"owner": owner, "done": False, "waits_for": [], **found(owner)}

    @router.post("/forget")
    async def forget(body: Forget, caller: Caller) -> dict[str, Any]:
        """`done` false: the work that `waits_for` names has not ended yet; ask again."""
        owner = body.owner
        if owner == BOX_ITSELF:
            raise InvalidValue("The box itself cannot be forgotten.", "owner")
        there = await db.read(None, found, owner)
        if there["unfinished"] and not body.cancel:
            raise Conflict(
                f"{len(there['unfinished'])} jobs, batches or responses of this owner have not ended: "
                f"{', '.join(there['unfinished'][:_SHOWN])}. Wait for their end, or ask with cancel (`--cancel`).",
                param="owner",
                code="owner_busy",
            )
        # Newest first: an adapter goes before its base.
        names = there["models"][::-1] if body.models else []
        # Before the first change: a model that somebody else uses would stop the request halfway.
        leaving = {*there["unfinished"], *names}
        for name in names:
            models.refuse_if_in_use(context, models.doomed(context, name), caller, leaving)
            await asyncio.sleep(0)
        for row in forgotten.keys_of(db, owner):
            keys.revoke(db, row.id)
            await asyncio.sleep(0)
        context.publish_keys()
        if left := await _ended(owner, caller):
            record(context, caller, "owner.forget", "", outcome="failed", waits_for=left)
            return {"owner": owner, "done": False, "waits_for": left, **there}
        deleted = await _delete_models(names, caller)
        await _delete(owner)
        pseudonym = f"forgotten-{secrets.token_hex(4)}"
        gone = await db.read(None, forgotten.names_of_gone, db, owner, pseudonym)
        for statement, *given in await db.read(None, forgotten.rows_with, db, gone):
            db.execute(statement, given)
            await asyncio.sleep(0)
        log = await db.read(None, forgotten.audit_texts, db, owner, pseudonym, gone)
        asked = await db.read(None, forgotten.handovers_asked_by, db, owner)
        forgotten.pseudonymise(db, owner, pseudonym, gone, log, asked)
        context.publish_keys()
        mentions = await db.read(None, forgotten.mentions, db, owner)
        mentions += await to_thread.run_sync(_in_logs, context.files_dir.parent, owner)
        told = {kind: there[kind] for kind in ("files", "uploads", "batches", "responses", "jobs", "evals")}
        record(
            context,
            caller,
            "owner.forget",
            pseudonym,
            keys=len(there["keys"]),
            **told,
            models_deleted=[_without(gone.get(name, name), owner) for name in deleted],
            models_left=[_without(name, owner) for name in there["models"] if name not in deleted],
            mentions=[_without(one, owner) for one in mentions[:_MENTIONED]],
            mentions_number=len(mentions),
        )
        # Last: what was deleted stands in the log until it is written over.
        if not await to_thread.run_sync(write_log.emptied, db.path, LOG_WITHIN_S):
            mentions.append(_LOG_STANDS)
        return {
            "owner": owner,
            "done": True,
            "waits_for": [],
            "pseudonym": pseudonym,
            "models_deleted": deleted,
            "mentions": mentions,
            **there,
        }

    def _without(name: str, owner: str) -> str:
        """For the audit log, which must not bring back what was just taken out of it."""
        return name.replace(owner, forgotten.NAMELESS)

    async def _ended(owner: str, caller: Principal) -> list[str]:
        """Cancel unfinished work and wait for it briefly; returns what has not ended by then."""
        for job_id in forgotten.ids(db, "jobs", owner, forgotten.JOB_GOES_ON):
            if (job := jobs.find(db, job_id)) is not None and not job.finished:
                ask(context, job.id, "cancel", caller)
            await asyncio.sleep(0)
        for batch_id in forgotten.ids(db, "batches", owner, "status IN ('validating', 'in_progress')"):
            batches.update(db, batch_id, status="cancelling", cancelling_s=time.time())
            runner.poke(batch_id)
            await asyncio.sleep(0)
        for response_id in forgotten.ids(db, "responses", owner, "status IN ('queued', 'in_progress')"):
            if (row := responses.find(db, response_id)) is not None:
                background.cancel(row)
            await asyncio.sleep(0)
        for sweep_id in sweeps.running(db, owner):
            if (sweep := sweeps.find(db, sweep_id)) is not None:
                await sweeping.cancel(sweep)
        for run_id in forgotten.ids(db, "pipeline_runs", owner, "state = 'running'"):
            pipelining.cancel(run_id)
            await asyncio.sleep(0)
        for gate_id in forgotten.ids(db, "gates", owner, "state NOT IN ('canary', 'ended')"):
            judging.cancel(gate_id)
            await asyncio.sleep(0)
        for run_id in evals.unfinished_ids(db, owner=owner):
            evaluations.cancel(run_id)
            await asyncio.sleep(0)
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while (left := await db.read(None, forgotten.unfinished, db, owner)) and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        return left

    async def _delete(owner: str) -> None:
        for job_id in forgotten.ids(db, "jobs", owner):
            job = jobs.find(db, job_id)
            for file_id in job.result_files if job is not None else ():
                if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
                    files.remove(context, row)
            await to_thread.run_sync(shutil.rmtree, context.jobs_dir / job_id, True)
            await to_thread.run_sync(_delete_of_trackers, context.files_dir.parent / "tracking", job_id)
            await little_by_little(partial(retention.delete_some_texts_of_job, db, job_id))
            forgotten.forget_texts(db, job_id)
        for file_id in forgotten.ids(db, "files", owner):
            if (row := file_rows.find(db, file_id, viewer=None, now_s=0)) is not None:
                files.remove(context, row)
            await asyncio.sleep(0)
        for upload_id in forgotten.ids(db, "uploads", owner):
            await to_thread.run_sync(shutil.rmtree, context.uploads_dir / upload_id, True)
        gone = [one for table in ("eval_runs", "evals") for one in forgotten.ids(db, table, owner)]
        await evaluations.delete(gone, within_s=None)
        await little_by_little(partial(forgotten.delete_some_parts, db, owner))
        await to_thread.run_sync(backup_copies.sweep, context.files_dir.parent)  # the whole database, of one killed
        for table in ("uploads", "batches", "responses", "idempotency", "pipeline_runs", "pipelines", "sweeps"):
            await little_by_little(partial(forgotten.delete_some, db, owner, table))

    async def _delete_models(names: list[str], caller: Principal) -> list[str]:
        deleted = []
        for name in names:
            await models.remove(context, models.doomed(context, name), caller)
            deleted.append(name)
        return deleted


def _in_logs(folder: Path, owner: str) -> list[str]:
    """Logs of the box in which the name stands as a word: in a path that somebody asked for, or a model's name."""
    word, longest = forgotten.word_of_bytes(owner), len(owner.encode()) + 2
    found = []
    for path in sorted((folder / "logs").rglob("*")):
        with suppress(FileNotFoundError):  # old ones are deleted meanwhile
            if path.is_file() and _has(path, word, longest):
                found.append(f"{path.relative_to(folder)}")
    return found


def _has(path: Path, word: re.Pattern[bytes], longest: int) -> bool:
    """Piece by piece: what Python looks through at once holds the other threads."""
    before = b""
    with path.open("rb") as file:
        while piece := file.read(_LOG_PIECE):
            if word.search(before + piece):
                return True
            before = piece[-longest:]
    return False


def _delete_of_trackers(folder: Path, job_id: str) -> None:
    """The files of a job's runs that W&B keeps on the box: they have the job's name, its tags and its project."""
    for run in (folder / "wandb").glob(f"*run-*-{glob.escape(job_id)}-*"):
        shutil.rmtree(run, ignore_errors=True)
