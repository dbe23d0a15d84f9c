"""/admin/v1/keys: create, list, revoke; /admin/v1/me: the caller's own; /admin/v1/usage: what they spent; and
/admin/v1/forget: deletes the data of a person who leaves. A new key is shown once; revoking reaches the gateways at
once. One that expires is revoked by the box."""

from __future__ import annotations

import asyncio
import glob
import json
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import CallableName, OwnerName, caller_of, model_of
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.files import storage
from appliance.controller.http.resource import list_object, part
from appliance.controller.http.routers import StrictBody, audited, needs, unaudited
from appliance.controller.interfaces.config import OwnerBounds, Scope
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, ANY, FINE_TUNING, INFERENCE, READ, Caller, Principal
from appliance.controller.jobs.events import pause_jobs_of, pause_jobs_without_model, set_wanted
from appliance.controller.openai.new_job import Priority
from appliance.store import evals, files, jobs, keys, models, usage
from appliance.store.database import Database, Part
from appliance.store.rows import UNFINISHED, KeyRow, columns
from runtime.logs import minute

log = logging.getLogger("appliance.controller")

# `model share --with all` means everyone, and usage reports list the box itself under a name.
RESERVED_OWNERS = ("all", usage.BOX_ITSELF)
EXPIRED_EVERY_S = 2.0
"""Gateways refuse an expired key by their own clock; this is how long what it had begun goes on."""
Limit = Annotated[int, Field(ge=1, le=10**15)]
Amount = Annotated[int, Field(ge=0, le=10**15)]
Bound = Literal[tuple(OwnerBounds.model_fields)]  # type: ignore[valid-type]


class KeyLimits(StrictBody):
    """What a key may use and spend; null lifts a limit. models: names of models, in addition to those its owner's jobs
    create. Token quotas count prompts and completions; days and months are in UTC. max_priority: of its jobs, which may
    be not preemptible or have a deadline if it is above 0. bounds: what its owner may keep, where that differs from
    `[controller.bounds]`. expires_s: Unix time at which it ends by itself."""

    models: Annotated[list[CallableName], Field(max_length=1000)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None
    max_priority: Priority | None = None
    bounds: dict[Bound, Amount] | None = None  # type: ignore[valid-type]
    expires_s: Annotated[float, Field(gt=0, le=10**11)] | None = None

    def columns(self) -> dict[str, Any]:
        """Return the columns of the fields that are set."""
        limits = self.model_dump(exclude_unset=True, include=KeyLimits.model_fields.keys())
        if "max_priority" in limits:
            limits["max_priority"] = limits["max_priority"] or 0
        return limits


class KeyCreate(KeyLimits):
    """scopes: default inference and fine_tuning, of a key with `models` inference alone. owner: owns what the key
    creates, and its share of the devices counts the key's jobs; default: the key's own name."""

    name: OwnerName
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=8)] | None = None
    owner: OwnerName | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db
    forget_routes(context, router)

    @router.get("/me")
    @needs(*ANY)
    def me(caller: Caller) -> dict[str, Any]:
        """The caller's key, as `/keys` shows it. For the box itself: `id` and `owner` null, its scopes."""
        row = keys.find(db, caller.key_id or "")
        return key_view(row) if row else {"id": None, "name": "box", "owner": None, "scopes": sorted(caller.scopes)}

    @router.get("/keys")
    @needs(ADMIN)
    def list_keys(part: Annotated[Part, part(1000, most=1000, order="asc")]) -> dict[str, Any]:
        """`last_asked_s`: when the last hour began in which it asked a model, or the key if that was later; null: it
        never did, or its usage is deleted. Reads and scrapes are not counted."""
        used = usage.last_used(db)

        def view(row: KeyRow) -> dict[str, Any]:
            return key_view(row) | {"last_asked_s": max(used[row.id], row.created_s) if row.id in used else None}

        return list_object(keys.page(db, **part), view)

    @router.post("/keys")
    @audited("key.create", "scopes", "owner")
    async def create(body: KeyCreate, caller: Caller) -> dict[str, Any]:
        # A key limited to models gets inference alone, unless it names its scopes.
        scopes: Sequence[str] = body.scopes or [INFERENCE, *([FINE_TUNING] if body.models is None else [])]
        if (owner := body.owner or body.name) in RESERVED_OWNERS:
            param = "owner" if body.owner else "name"
            raise InvalidValue(f"The owner name {owner!r} is reserved; choose another name.", param)
        _check(context, body)
        try:
            row, key = keys.create(db, body.name, list(dict.fromkeys(scopes)), body.owner, **body.columns())
        except sqlite3.IntegrityError as error:
            message = f"A key named {shown(body.name)} exists; revoke it first or choose another name."
            raise Conflict(message, "name", "key_exists") from error
        context.spending.publish_keys()
        return key_view(row) | {"key": key}

    @router.patch("/keys/{id_or_name}")
    async def limit(id_or_name: str, body: KeyLimits, caller: Caller) -> dict[str, Any]:
        row = _known(context, id_or_name)
        _check(context, body, known=row.models or ())
        if row.subject and body.expires_s is not None:
            raise InvalidValue(f"{row.name} comes by the login provider, whose groups end that key.", "expires_s")
        limits = body.columns()
        with db.transaction():
            keys.update(db, row.id, **limits)
            # Pauses jobs that train a model which the key may no longer use.
            paused = {"jobs": ids} if (ids := pause_jobs_without_model(db)) else {}
            record(context, caller, "key.limit", row.id, name=row.name, **limits, **paused)
        context.spending.publish_keys()
        if paused:
            context.scheduler.nudge(f"{row.id} lost a model")
        return key_view(keys.find(db, row.id) or row)

    @router.post("/keys/{id_or_name}/rotate")
    async def rotate(id_or_name: str, request: Request, caller: Caller) -> dict[str, Any]:
        """A new secret for the same key, shown once. The old one is refused at once, with the requests and logins of
        the page that came by it; jobs, batches, usage and limits stay."""
        await request.body()  # gateways end requests of the old secret, so the new secret would not arrive
        row = _known(context, id_or_name)
        if row.subject:
            message = f"{row.name} comes by the login provider, and nobody holds that key; make one of the same owner."
            raise BadRequest(message, "id", "key_of_a_login")
        with db.transaction():
            renewed, key = keys.renew(db, row.id)
            record(context, caller, "key.rotate", row.id, name=row.name)
        context.spending.publish_keys()
        return key_view(renewed) | {"key": key}

    @router.delete("/keys/{id_or_name}")
    async def revoke(id_or_name: str, caller: Caller) -> dict[str, Any]:
        """Stops the key's work: fails its background responses, batches, runs of evals and operations, pauses its jobs.
        Revoking it again has no further effect."""
        before = _known(context, id_or_name, live=False)
        stopped = end_key(context, before.id, caller, "key.revoke")
        context.spending.publish_keys()
        context.scheduler.nudge(f"{before.id} was revoked")
        return key_view(keys.find(db, before.id) or before) | {"stopped": stopped}

    @router.get("/usage")
    @needs(READ, INFERENCE, FINE_TUNING)
    def report(
        caller: Caller,
        by: usage.By = "key",
        since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time; its hour counts whole")] = 0.0,
    ) -> dict[str, Any]:
        """Requests and tokens of inference, and device-hours of training: up to date to within a second. `by=hour`
        lists the newest 2,400 hours in which there was any.

        A key that is neither an admin's nor of scope `read` sees what its owner's keys spent."""
        now_s = time.time()
        rows = usage.report(db, by, since_s, now_s, None if caller.may(READ) else caller.owner)
        return {"object": "list", "by": by, "since_s": since_s, "until_s": now_s, "data": rows}


def key_view(row: KeyRow) -> dict[str, Any]:
    limits = "models requests_per_minute tokens_per_minute tokens_per_day tokens_per_month bounds expires_s"
    return columns(row, f"id name scopes owner prefix created_s revoked_s {limits} max_priority")


def _known(context: ControllerContext, id_or_name: str, *, live: bool = True) -> KeyRow:
    """Return the key with this id or name. live: ignore revoked keys. Raises NotFound."""
    row = keys.find(context.db, id_or_name)
    if row is None or (live and row.revoked_s is not None):
        raise NotFound(f"No {'live ' * live}key with the id or name {shown(id_or_name)}.", "id", "key_not_found")
    return row


def _check(context: ControllerContext, body: KeyLimits, known: Collection[str] = ()) -> None:
    """Check the limits of a key. known: models already on the key, which may be deleted. Raises BadRequest."""
    for name in body.models or ():
        if name not in known and models.find(context.db, model_of(context.db, name)) is None:
            message = f"The model {shown(name)} does not exist on this box; `appliance model list` shows those that do."
            raise BadRequest(message, "models", "model_not_found")
    if body.expires_s is not None and body.expires_s <= time.time():
        past = f"expires_s is {body.expires_s:.0f}, {minute(body.expires_s)}, which is past"
        raise InvalidValue(f"{past}; to end a key now, revoke it.", "expires_s")


# --- what ends with a key, however it ends: its logins and its tasks; its jobs are paused


def end_key(context: ControllerContext, key_id: str, caller: Principal, action: str) -> dict[str, list[str]]:
    """Revoke a key, with the audit row of this action. The caller publishes the keys afterwards, once for all that end
    together. Returns {kind: ids of stopped objects}, empty for a key that was revoked before. Raises
    RowNotFound."""
    stopped: dict[str, list[str]] = {"jobs": [], "batches": [], "responses": []}  # and of other kinds
    with context.db.transaction():
        is_fresh = not keys.how_ended(context.db, key_id)
        row = keys.revoke(context.db, key_id)
        if is_fresh:
            stopped |= {"jobs": pause_jobs_of(context.db, row.id), **context.tasks.of_key(row.id)}
        detail = {kind: ids for kind, ids in stopped.items() if ids}
        record(context, caller, action, row.id, name=row.name, **detail)
    context.tasks.end_key(row.id)
    return stopped


async def end_expired(context: ControllerContext) -> None:
    """Revoke the keys whose time is over, and publish the table once for all of them: many may expire together."""
    ended = keys.list_all(context.db, "expires_s <= ? AND revoked_s IS NULL", time.time())
    for row in ended:
        end_key(context, row.id, caller_of(context.db, None), "key.expire")
    if ended:
        context.spending.publish_keys()
        context.scheduler.nudge(f"{len(ended)} keys have expired")


# --- a person who leaves
#
# Deleted: job folders and events, and the owner's rows of every table but `_KEPT`, which get a pseudonym. A repeated
# request continues where the last one stopped.

_COUNTED = ("files", "uploads", "batches", "responses", "jobs", "evals")
_KEPT = ("keys", "jobs", "models", "model_shares", "usage", "device_time", "audit", "tasks")
_MINE = {"owner": "owner = ?1", "key_id": "key_id IN (SELECT id FROM keys WHERE owner = ?1)"}
_WAITED_FOR = ("jobs", "batches", "responses", "eval_runs")
_NAMED = (("audit", "target"), ("model_settings", "by_whom"), ("handovers", "asked_by"))
"""Columns that name a key or an owner. Those of `_NAMED_IN` are JSON, where only a name behind the third text is
replaced, because a key may have the name of a mode, such as "train"."""
_NAMED_IN = (("audit", "detail", ""), ("box", "value", '"by":'), ("cordons", "drain", '"by":'))
Owner = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Forget(StrictBody):
    owner: Owner


def forget_routes(context: ControllerContext, router: APIRouter) -> None:
    @router.get("/forget")
    @needs(ADMIN)  # it names an owner's keys
    def show(owner: Annotated[Owner, Query()]) -> dict[str, Any]:
        """List the box's data of this owner. Changes nothing."""
        return {"owner": owner, "done": False, **_stored_of(context.db, owner)}

    @router.post("/forget")
    @unaudited  # its own rows, of keys and with a pseudonym
    async def forget(body: Forget, caller: Caller) -> dict[str, Any]:
        """End an owner's work, delete what is stored of it, and take its name out of what stays. `done` false: the work
        in `unfinished` has not ended yet; ask again."""
        db, owner = context.db, body.owner
        # Once each: a polling client would restart the end of the key's work every half second.
        for row in keys.list_all(db, "owner = ? AND revoked_s IS NULL", owner):
            end_key(context, row.id, caller, "key.revoke")
        context.spending.publish_keys()
        for job_id in _ids(db, "jobs", owner, f"{UNFINISHED['jobs']} AND wanted != 'cancel'"):
            set_wanted(context, job_id, "cancel", caller)
        stored = await asyncio.to_thread(_stored_of, db, owner)
        if stored["unfinished"]:
            return {"owner": owner, "done": False, **stored}
        pseudonym = f"forgotten-{secrets.token_hex(4)}"
        await asyncio.to_thread(_delete, context, owner)
        await asyncio.to_thread(rename, db, owner, pseudonym)
        context.spending.publish_keys()
        counts = {kind: stored[kind] for kind in _COUNTED}
        record(context, caller, "owner.forget", pseudonym, keys=len(stored["keys"]), **counts)
        await asyncio.to_thread(db.empty_log)  # deleted rows stay in the log until it is overwritten
        return {"owner": owner, "done": True, "pseudonym": pseudonym, **stored}


def _stored_of(db: Database, owner: str) -> dict[str, Any]:
    mine = _mine(db)
    # A model is listed if one of its versions was trained on the files.
    models_of_files = db.column(
        f"WITH given AS (SELECT id FROM files WHERE {mine['files']}), known AS (SELECT id FROM jobs WHERE"
        f" {mine['jobs']} OR training_file IN given OR validation_file IN given)"
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
    return db.column(f"SELECT id FROM {table} WHERE {_mine(db)[table]} AND {where} ORDER BY seq", [owner])


def _mine(db: Database) -> dict[str, str]:
    """By table: a condition that the row's owner, or the owner of the key it was made with, is ?1. From the schema,
    so that a table added later is not forgotten."""
    found = {table: [_MINE[name] for name in _MINE if name in columns] for table, columns in db.columns().items()}
    return {table: f"({' OR '.join(conditions)})" for table, conditions in found.items() if conditions}


def _delete(context: ControllerContext, owner: str) -> None:
    """Delete the owner's bytes and rows, except the rows that `rename` keeps."""
    db = context.db
    for kind in ("eval_runs", "evals"):
        for row_id in _ids(db, kind, owner):
            evals.delete(db, row_id)
    file_ids = _ids(db, "files", owner)
    for job_id in _ids(db, "jobs", owner):
        file_ids += jobs.get(db, job_id).result_files
        shutil.rmtree(context.jobs_dir / job_id, ignore_errors=True)
        # W&B's local files contain the job's name, tags and project.
        for run in (context.files_dir.parent / "tracking" / "wandb").glob(f"*run-*-{glob.escape(job_id)}-*"):
            shutil.rmtree(run, ignore_errors=True)
        for table in ("job_events", "job_judges"):
            db.delete(table, "job_id = ?", [job_id])
    for file_id in file_ids:
        if (row := files.find(db, file_id, viewer=None, now_s=0)) is not None:
            storage.remove(context, row)
    for upload_id in _ids(db, "uploads", owner):
        shutil.rmtree(context.uploads_dir / upload_id, ignore_errors=True)
    for table, mine in _mine(db).items():
        if table not in _KEPT:
            db.delete(table, mine, [owner])


def rename(db: Database, owner: str, pseudonym: str) -> None:
    """Put a pseudonym in place of the owner, and delete what the owner wrote in the rows that stay: a job's suffix and
    metadata, and details in the audit log. Call it on a thread: it reads whole tables."""
    known = keys.list_all(db, "owner = ?", owner)
    with db.transaction():
        db.execute(
            "UPDATE jobs SET metadata = NULL, integrations = NULL, suffix = NULL, reason = '',"
            f" error = json_set(error, '$.message', '(forgotten)') WHERE {_mine(db)['jobs']}",
            [owner],
        )
        db.execute("UPDATE audit SET detail = '{}' WHERE key_id IN (SELECT id FROM keys WHERE owner = ?)", [owner])
        for name in {owner, *(row.name for row in known)}:
            for table, column in _NAMED:
                db.execute(f"UPDATE {table} SET {column} = ?2 WHERE {column} = ?1", [name, pseudonym])
            for table, column, before in _NAMED_IN:
                texts = [before + json.dumps(name), before + json.dumps(pseudonym)]
                db.execute(f"UPDATE {table} SET {column} = replace({column}, ?1, ?2) WHERE instr({column}, ?1)", texts)
        for number, key in enumerate(known, 1):
            keys.update(db, key.id, name=f"{pseudonym}-{number}", subject="")
        for table in [table for table, columns in db.columns().items() if "owner" in columns]:
            db.execute(f"UPDATE {table} SET owner = ?2 WHERE owner = ?1", [owner, pseudonym])
