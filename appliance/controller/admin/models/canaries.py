"""Which version of a model answers: roll back, pin, begin and end a canary.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import stored_model, stored_version
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models import activation
from appliance.controller.models.canaries import Canaries
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.records import canaries
from appliance.store.rows import ModelRow

Version = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Pin(StrictBody):
    version: Version
    pinned: bool


class Rollback(StrictBody):
    version: Version | None = None


class Canary(StrictBody):
    """share: fraction of the requests, 0.1 for one in ten. watch_s: how long it is watched, in seconds."""

    version: Version
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    auto: bool = False
    watch_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 50


def routes(context: ControllerContext, router: APIRouter, running: Canaries) -> None:
    """Add the routes to the admin router; before those of models, whose names may contain slashes."""
    db = context.db

    @router.post("/models/{name:path}/rollback")
    async def rollback(name: str, caller: Caller, body: Rollback | None = None) -> dict[str, Any]:
        """Without a version: ends the canary if there is one, else goes back to the version before."""
        version = body.version if body else None
        stored_model(db, name)
        async with activation.lock(name):
            if version is None and canaries.find_running(db, name) is not None:
                return running.roll_back(name, caller)
            row = stored_model(db, name)
            target = _rollback_target(db, row, version)
            measured = await activation.change(
                context, row, target, caller, "model.rollback", f"rolls back to {target}"
            )
            record(context, caller, "model.rollback", row.id, before=row.active_version, to=target)
            return {"model": row.id, "from": row.active_version, "to": target, "swap": measured}

    @router.post("/models/{name:path}/pin")
    async def pin(name: str, body: Pin, caller: Caller) -> dict[str, Any]:
        row = stored_version(db, stored_model(db, name).id, body.version)
        models.update_version(db, name, row.version, pinned=int(body.pinned))
        context.tiers.nudge()
        record(context, caller, "model.pin", name, **body.model_dump())
        return {"model": name, **body.model_dump()}

    @router.put("/models/{name:path}/canary")
    async def begin(name: str, body: Canary, caller: Caller) -> dict[str, Any]:
        return running.view(running.begin(name, caller, **body.model_dump()))

    @router.get("/models/{name:path}/canary")
    async def show(name: str) -> dict[str, Any]:
        row = canaries.find(db, name)
        if row is None:
            raise NotFound(
                f"{shown(name)} has no canary, and never had one; `appliance model canary MODEL VERSION` begins one.",
                param="model",
                code="no_canary",
            )
        return running.view(row)

    @router.delete("/models/{name:path}/canary")
    async def end(name: str, caller: Caller) -> dict[str, Any]:
        async with activation.lock(name):
            return running.roll_back(name, caller)

    @router.post("/models/{name:path}/promote")
    async def promote(name: str, caller: Caller) -> dict[str, Any]:
        """A request that comes again is told what the first has changed."""
        async with activation.lock(name):
            model, last = stored_model(db, name), canaries.find(db, name)
            if last is not None and last.state == "promoted" and last.version == model.active_version:
                return {"model": name, "from": last.before, "to": last.version, "swap": {}}
            return await running.promote(model, caller, "asked for")


def _rollback_target(db: Database, row: ModelRow, version: str | None) -> str:
    if version is not None:
        return stored_version(db, row.id, version).version
    older = models.version_before(db, row.id, row.active_version) if row.active_version else None
    if older is None:
        raise Conflict(
            f"{row.id} has no version before {row.active_version} that has answered; `--version` takes another one of "
            "`appliance model show`.",
            param="version",
            code="no_older_version",
        )
    return older.version
