"""/admin/v1/keys: create, list, revoke. A new key is shown once; revoking reaches the gateways at once."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.controller import admin_views
from appliance.controller.audit import record
from appliance.controller.context import ControllerContext
from appliance.controller.errors import BadRequest, Conflict, NotFound, shown
from appliance.controller.principal import FINE_TUNING, INFERENCE, Caller
from appliance.store import keys
from appliance.store.errors import DuplicateRow, RowNotFound

DEFAULT_SCOPES = [INFERENCE, FINE_TUNING]


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ @-]{0,63}$")]


Limit = Annotated[int, Field(ge=1, le=10**15)]


class KeyLimits(BaseModel):
    """What a key may use and spend; null lifts a limit. models: names of models, beside those that its own jobs make.
    The quotas of tokens count prompts and completions; days and months are those of UTC."""

    model_config = ConfigDict(extra="forbid", strict=True)

    models: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=512)]], Field(max_length=1000)] | None
    ) = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None


class KeyCreate(KeyLimits):
    """owner: whose share of the devices its jobs count towards; left out, the key's own name."""

    name: Name
    scopes: Annotated[list[str], Field(min_length=1, max_length=8)] | None = None
    owner: Name | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    db = context.db

    @router.get("/keys")
    async def list_keys() -> dict[str, Any]:
        return {"object": "list", "data": [admin_views.key(row) for row in keys.list_all(db) if not row.session]}

    @router.post("/keys")
    async def create(body: KeyCreate, caller: Caller) -> dict[str, Any]:
        scopes = body.scopes or DEFAULT_SCOPES
        unknown = [scope for scope in scopes if scope not in keys.SCOPES]
        if unknown:
            raise BadRequest(f"Unknown scope {shown(unknown[0])}; the scopes are {', '.join(keys.SCOPES)}.",
                             param="scopes", code="invalid_value")  # fmt: skip
        try:
            with db.transaction():
                limits = body.model_dump(exclude_unset=True, include=KeyLimits.model_fields.keys())
                row, key = keys.create(db, body.name, list(dict.fromkeys(scopes)), body.owner, **limits)
                record(context, caller, "key.create", row.id, name=row.name, scopes=row.scopes, owner=row.owner,
                       **limits)  # fmt: skip
        except DuplicateRow as error:
            raise Conflict(f"A key named {shown(body.name)} exists; revoke it first or choose another name.",
                           param="name", code="key_exists") from error  # fmt: skip
        context.publish_keys()
        return admin_views.key(row) | {"key": key}

    @router.patch("/keys/{id_or_name}")
    async def limit(id_or_name: str, body: KeyLimits, caller: Caller) -> dict[str, Any]:
        row = keys.find(db, id_or_name)
        if row is None or row.revoked_s is not None:
            raise NotFound(f"No live key with the id or name {shown(id_or_name)}.", param="id", code="key_not_found")
        limits = body.model_dump(exclude_unset=True)
        with db.transaction():
            keys.update(db, row.id, **limits)
            record(context, caller, "key.limit", row.id, name=row.name, **limits)
        context.publish_keys()
        return admin_views.key(keys.find(db, row.id) or row)

    @router.delete("/keys/{id_or_name}")
    async def revoke(id_or_name: str, caller: Caller) -> dict[str, Any]:
        try:
            with db.transaction():
                row = keys.revoke(db, id_or_name)
                record(context, caller, "key.revoke", row.id, name=row.name)
        except RowNotFound as error:
            raise NotFound(f"No key with the id or name {shown(id_or_name)}.", param="id",
                           code="key_not_found") from error  # fmt: skip
        context.publish_keys()
        return admin_views.key(row)
