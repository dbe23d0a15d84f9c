"""/admin/v1/forget: deletes the data of a person who leaves.

Deleted: files, uploads, stored responses, batches, evals, job folders and events. Kept without the name: usage, the
audit log, jobs. Revoked: the keys. Models that were trained on their files are listed. Repeating the request continues
where the last one stopped. A row belongs to its own owner, or to the owner of the key it was made with.
"""

from __future__ import annotations

import asyncio
import glob
import json
import secrets
import shutil
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from appliance.controller.admin.keys import end_key
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.files import storage
from appliance.controller.http.routers import StrictBody, needs, unaudited
from appliance.controller.interfaces.principal import ADMIN, Caller
from appliance.controller.jobs.wanted import ask
from appliance.store.database import TABLES, Database
from appliance.store.objects import evals, files, jobs
from appliance.store.records import keys
from appliance.store.rows import UNFINISHED

_COUNTED = ("files", "uploads", "batches", "responses", "jobs", "evals")
_WAITED_FOR = ("jobs", "batches", "responses", "eval_runs")
_NAMED = (("audit", "target"), ("model_settings", "by_whom"), ("handovers", "asked_by"))
"""Columns that say by the name of a key or an owner who did something; the texts of `_NAMED_IN` are JSON."""
_NAMED_IN = (("audit", "detail"), ("box", "value"))
Owner = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Forget(StrictBody):
    """owner: as in keys."""

    owner: Owner


def routes(context: ControllerContext, router: APIRouter) -> None:
    @router.get("/forget")
    @needs(ADMIN)  # it names an owner's keys
    def show(owner: Annotated[Owner, Query()]) -> dict[str, Any]:
        """What the box has of this owner. Changes nothing."""
        return {"owner": owner, "done": False, **_stored_of(context.db, owner)}

    @router.post("/forget")
    @unaudited  # its own rows, of keys and with a pseudonym
    async def forget(body: Forget, caller: Caller) -> dict[str, Any]:
        """End an owner's work, delete what is stored of it, and take its name out of what stays. `done` false: the work
        in `unfinished` has not ended yet; ask again."""
        db, owner = context.db, body.owner
        # Once each: a client that asks every half second would restart what ends the work of a key over and over.
        for row in keys.list_all(db, "owner = ? AND revoked_s IS NULL", owner):
            end_key(context, row.id, caller, "key.revoke")
        context.spending.publish_keys()
        for job_id in _ids(db, "jobs", owner, f"{UNFINISHED['jobs']} AND wanted != 'cancel'"):
            ask(context, job_id, "cancel", caller)
        stored = await asyncio.to_thread(_stored_of, db, owner)
        if stored["unfinished"]:
            return {"owner": owner, "done": False, **stored}
        pseudonym = f"forgotten-{secrets.token_hex(4)}"
        await asyncio.to_thread(_delete, context, owner)
        await asyncio.to_thread(rename, db, owner, pseudonym)
        context.spending.publish_keys()
        counts = {kind: stored[kind] for kind in _COUNTED}
        record(context, caller, "owner.forget", pseudonym, keys=len(stored["keys"]), **counts)
        await asyncio.to_thread(db.empty_log)  # what was deleted stands there until it is written over
        return {"owner": owner, "done": True, "pseudonym": pseudonym, **stored}


def _stored_of(db: Database, owner: str) -> dict[str, Any]:
    # One of several versions is enough.
    models_of_files = db.column(
        f"WITH given AS (SELECT id FROM files WHERE {_mine('files')}), known AS (SELECT id FROM jobs WHERE"
        f" {_mine('jobs')} OR training_file IN given OR validation_file IN given)"
        " SELECT id FROM models WHERE job_id IN known"
        " OR id IN (SELECT model FROM versions WHERE job_id IN known) ORDER BY seq",
        [owner],
    )
    return {
        "keys": [row.name for row in keys.list_all(db, "owner = ?", owner)],
        "models": models_of_files,
        "unfinished": [row_id for table in _WAITED_FOR for row_id in _ids(db, table, owner, UNFINISHED[table])],
        **{kind: len(_ids(db, kind, owner)) for kind in _COUNTED},
    }


def _ids(db: Database, table: str, owner: str, where: str = "1") -> list[str]:
    return db.column(f"SELECT id FROM {table} WHERE {_mine(table)} AND {where} ORDER BY seq", [owner])


def _mine(table: str) -> str:
    """A condition that the row's owner, or the owner of the key it was made with, is ?1."""
    columns, of_key = TABLES[table][0], "key_id IN (SELECT id FROM keys WHERE owner = ?1)"
    return f"(owner = ?1 OR {of_key})" if "owner" in columns else of_key


def _delete(context: ControllerContext, owner: str) -> None:
    """Delete the owner's bytes and rows, but for those that `rename` keeps."""
    db = context.db
    for kind in ("eval_runs", "evals"):
        for row_id in _ids(db, kind, owner):
            evals.delete(db, row_id)
    file_ids = _ids(db, "files", owner)
    for job_id in _ids(db, "jobs", owner):
        file_ids += jobs.get(db, job_id).result_files
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        # W&B's files on the box have the job's name, its tags and its project.
        for run in (context.files_dir.parent / "tracking" / "wandb").glob(f"*run-*-{glob.escape(job_id)}-*"):
            shutil.rmtree(run, ignore_errors=True)
        for table in ("job_events", "job_judges"):
            db.delete(table, "job_id = ?", [job_id])
    for file_id in file_ids:
        if (row := files.find(db, file_id, viewer=None, now_s=0)) is not None:
            storage.remove(context, row)
    for upload_id in _ids(db, "uploads", owner):
        shutil.rmtree(context.uploads_dir / upload_id, ignore_errors=True)
    for table in ("uploads", "batches", "responses", "idempotency"):
        db.delete(table, _mine(table), [owner])


def rename(db: Database, owner: str, pseudonym: str) -> None:
    """Give the owner's keys, jobs and what else stays a pseudonym. What the owner wrote goes: a job's suffix and
    metadata, details of what was done. Call it on a thread: it reads whole tables."""
    known = keys.list_all(db, "owner = ?", owner)
    with db.transaction():
        db.execute(
            "UPDATE jobs SET metadata = NULL, integrations = NULL, suffix = NULL, reason = '',"
            f" error = json_set(error, '$.message', '(forgotten)') WHERE {_mine('jobs')}",
            [owner],
        )
        db.execute("UPDATE audit SET detail = '{}' WHERE key_id IN (SELECT id FROM keys WHERE owner = ?)", [owner])
        for name in {owner, *(row.name for row in known)}:
            for table, column in _NAMED:
                db.execute(f"UPDATE {table} SET {column} = ?2 WHERE {column} = ?1", [name, pseudonym])
            quoted = [json.dumps(name), json.dumps(pseudonym)]
            for table, column in _NAMED_IN:
                db.execute(f"UPDATE {table} SET {column} = replace({column}, ?1, ?2) WHERE instr({column}, ?1)", quoted)
        for number, key in enumerate(known, 1):
            keys.update(db, key.id, name=f"{pseudonym}-{number}", subject="")
        # Every table with an owner, so that one that is added later is not left out.
        tables = "SELECT m.name FROM sqlite_master AS m, pragma_table_info(m.name) AS c WHERE c.name = 'owner'"
        for table in db.column(f"{tables} AND m.type = 'table'"):
            db.execute(f"UPDATE {table} SET owner = ?2 WHERE owner = ?1", [owner, pseudonym])
