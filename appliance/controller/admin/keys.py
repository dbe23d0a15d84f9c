"""/admin/v1/keys: create, list, revoke; /admin/v1/me: the asker's own; /admin/v1/usage: what they spent. A new key is
shown once; revoking reaches the gateways at once. One that expires is revoked by the box."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from appliance.controller.access.model_access import CallableName, OwnerName, caller_of, model_of
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.http.resource import list_object, part
from appliance.controller.http.routers import StrictBody, audited, needs
from appliance.controller.interfaces.config import OwnerBounds, Scope
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, ANY, FINE_TUNING, INFERENCE, READ, Caller, Principal
from appliance.controller.jobs.wanted import pause_jobs_of, pause_jobs_without_model
from appliance.controller.openai.new_job import Priority
from appliance.store.database import Part
from appliance.store.errors import DuplicateRow
from appliance.store.objects import models
from appliance.store.records import keys, usage
from appliance.store.rows import KeyRow, columns
from runtime.logs import minute

log = logging.getLogger("appliance.controller")

# `model share --with all` means everyone, and usage has what commands on the box itself spent.
RESERVED_OWNERS = ("all", usage.BOX_ITSELF)
EXPIRED_EVERY_S = 2.0
"""Gateways refuse an expired key by their own clock; this is how long what it had begun goes on."""
Limit = Annotated[int, Field(ge=1, le=10**15)]
Amount = Annotated[int, Field(ge=0, le=10**15)]
Bound = Literal[tuple(OwnerBounds.model_fields)]  # type: ignore[valid-type]


class KeyLimits(StrictBody):
    """What a key may use and spend; null lifts a limit. models: names of models, in addition to those its owner's jobs
    create. Token quotas count prompts and completions; days and months are in UTC. max_priority: of its
    jobs, which may be not preemptible or have a deadline if it is above 0. bounds: what its owner may keep, where that
    differs from `[controller.bounds]`. expires_s: Unix time at which it ends by
    itself.
    """

    models: Annotated[list[CallableName], Field(max_length=1000)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None
    max_priority: Priority | None = None
    bounds: dict[Bound, Amount | None] | None = None  # type: ignore[valid-type]
    expires_s: Annotated[float, Field(gt=0, le=10**11)] | None = None

    def columns(self) -> dict[str, Any]:
        """The columns of the fields that are set."""
        limits = self.model_dump(exclude_unset=True, include=KeyLimits.model_fields.keys())
        if self.bounds is not None:
            limits["bounds"] = {name: bound for name, bound in self.bounds.items() if bound is not None} or None
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

    @router.get("/me")
    @needs(*ANY)
    def me(caller: Caller) -> dict[str, Any]:
        """The key that asks, as `/keys` shows it. For the box itself: `id` and `owner` null, its scopes."""
        row = keys.find(db, caller.key_id) if caller.key_id is not None else None
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
        # A key for certain models is for using them; who may also train says so.
        scopes: Sequence[str] = body.scopes or [INFERENCE, *([FINE_TUNING] if body.models is None else [])]
        if (owner := body.owner or body.name) in RESERVED_OWNERS:
            param = "owner" if body.owner else "name"
            raise InvalidValue(f"The owner name {owner!r} is reserved; choose another name.", param)
        _check(context, body)
        try:
            row, key = keys.create(db, body.name, list(dict.fromkeys(scopes)), body.owner, **body.columns())
        except DuplicateRow as error:
            message = f"A key named {shown(body.name)} exists; revoke it first or choose another name."
            raise Conflict(message, "name", "key_exists") from error
        context.spending.publish_keys()
        return key_view(row) | {"key": key}

    @router.patch("/keys/{id_or_name}")
    async def limit(id_or_name: str, body: KeyLimits, caller: Caller) -> dict[str, Any]:
        row = _live(context, id_or_name)
        _check(context, body, known=row.models or ())
        if row.subject and body.expires_s is not None:
            why = "whose groups say who may still come: that key has no end"
            raise InvalidValue(f"{row.name} comes by the login provider, {why}.", "expires_s")
        limits = body.columns()
        with db.transaction():
            keys.update(db, row.id, **limits)
            # Jobs that have a model which it may not use any more.
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
        await request.body()  # gateways cut off what still arrives by the old one, and nobody would see the new one
        row = _live(context, id_or_name)
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
        Revoking it again has no further effect, and says so."""
        if (before := keys.find(db, id_or_name)) is None:
            raise NotFound(f"No key with the id or name {shown(id_or_name)}.", "id", "key_not_found")
        stopped = end_key(context, before.id, caller, "key.revoke")
        context.spending.publish_keys()
        context.scheduler.nudge(f"{before.id} was revoked")
        return {
            **key_view(keys.find(db, before.id) or before),
            "stopped": stopped,
            "already_revoked": before.revoked_s is not None,
            "admin_keys": sum(ADMIN in one.scopes for one in keys.list_live(db)),
        }

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


def _live(context: ControllerContext, id_or_name: str) -> KeyRow:
    """Raises NotFound."""
    row = keys.find(context.db, id_or_name)
    if row is None or row.revoked_s is not None:
        raise NotFound(f"No live key with the id or name {shown(id_or_name)}.", "id", "key_not_found")
    return row


def _check(context: ControllerContext, body: KeyLimits, known: Collection[str] = ()) -> None:
    """known: models on the key already, which may have gone since. Raises BadRequest."""
    for name in body.models or ():
        if name not in known and models.find(context.db, model_of(context.db, name)) is None:
            message = f"The model {shown(name)} does not exist on this box; `appliance model list` shows those that do."
            raise BadRequest(message, "models", "model_not_found")
    if body.expires_s is not None and body.expires_s <= time.time():
        past = f"expires_s is {body.expires_s:.0f}, {minute(body.expires_s)}, which is past"
        raise InvalidValue(f"{past}; a key that shall end now is revoked instead.", "expires_s")


# --- what ends with a key, however it ends: its logins and its tasks; its jobs are paused


def end_key(context: ControllerContext, key_id: str, caller: Principal, action: str) -> dict[str, list[str]]:
    """Revoke a key, with the audit row of this action. The caller publishes the keys afterwards, once for all that end
    together. Returns the ids of what was stopped, by kind: nothing for a key that was revoked before. Raises
    RowNotFound."""
    stopped: dict[str, list[str]] = {"jobs": [], "batches": [], "responses": []}  # and of other kinds
    with context.db.transaction():
        is_fresh = not keys.is_revoked(context.db, key_id)
        row = keys.revoke(context.db, key_id)
        if is_fresh:
            stopped |= {"jobs": pause_jobs_of(context.db, row.id), **context.tasks.of_key(row.id)}
        detail = {kind: ids for kind, ids in stopped.items() if ids}
        record(context, caller, action, row.id, name=row.name, **detail)
    context.tasks.end_key(row.id)
    return stopped


async def end_expired(context: ControllerContext) -> None:
    """Revoke the keys whose time is over. The gateways refuse them by themselves from then on, so the table of all
    keys is written once for all of them: a course's three hundred end in the same second."""
    ended = keys.list_ending(context.db, time.time())
    for row in ended:
        end_key(context, row.id, caller_of(context.db, None), "key.expire")
    if ended:
        context.spending.publish_keys()
        context.scheduler.nudge(f"{len(ended)} keys have expired")
