"""/admin/v1/models: list and show models, roll back, pin a version. operation_routes.py imports them.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import StringConstraints

from appliance.controller.access.model_access import no_version, stored_model
from appliance.controller.admin import views
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.reading import Status, answer
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, SwapFailed
from appliance.controller.interfaces.model_states import ModelStates
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models import activation
from appliance.controller.models.canaries import Canaries
from appliance.store.database import Database, Part
from appliance.store.objects import models
from appliance.store.records import canaries
from appliance.store.rows import ModelRow

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Pin(StrictBody):
    version: Text
    pinned: bool


class Rollback(StrictBody):
    version: Text | None = None


def routes(context: ControllerContext, router: APIRouter, compared: Canaries) -> None:
    """Add the routes to the admin router."""
    db = context.db

    @router.get("/models")
    def list_models(now: Status, part: Annotated[Part, RECENT]) -> dict[str, Any]:
        """Newest first."""
        states = ModelStates(db, now)
        page = models.page(db, **part)
        return list_object(page, lambda row: views.model(db, row, now, states, context.tiers, context.sizes))

    @router.post("/models/{name:path}/rollback")
    async def rollback(name: str, caller: Caller, body: Rollback | None = None) -> dict[str, Any]:
        """Without a version: to the one before, or to the active one of a model that has a canary."""
        version = body.version if body else None
        stored_model(db, name)
        if version is None and canaries.find_running(db, name) is not None:
            return await compared.roll_back(name, caller)
        async with activation.lock(name):
            row = stored_model(db, name)
            target = _rollback_target(db, row, version)
            try:
                measured = await activation.switch(context, row, target, f"{row.id} rolls back to {target}")
            except SwapFailed as error:
                record(context, caller, "model.rollback", row.id, outcome="failed", to=target, error=str(error))
                raise Conflict(f"The roll back failed: {error}", param="version", code="swap_failed") from error
            record(context, caller, "model.rollback", row.id, before=row.active_version, to=target)
            return {"model": row.id, "from": row.active_version, "to": target, "swap": measured}

    @router.post("/models/{name:path}/pin")
    async def pin(name: str, body: Pin, caller: Caller) -> dict[str, Any]:
        row = stored_model(db, name)
        if models.find_version(db, row.id, body.version) is None:
            raise no_version(db, row.id, body.version)
        models.update_version(db, row.id, body.version, pinned=int(body.pinned))
        context.tiers.nudge()
        record(context, caller, "model.pin", row.id, version=body.version, pinned=body.pinned)
        return {"model": row.id, "version": body.version, "pinned": body.pinned}

    @router.get("/models/{name:path}", response_model=dict[str, Any])
    async def show(name: str, caller: Caller, now: Status) -> Response:
        """`canary`: the most recent one, running or ended."""
        last = canaries.find(db, name)
        shown_canary = await compared.view(last, time.time()) if last else None

        def shown_model() -> dict[str, Any]:
            row = stored_model(db, name)
            found = views.model(db, row, now, ModelStates(db, now), context.tiers, context.sizes)
            return found | {"canary": shown_canary}

        return await answer(db, shown_model)


_VERSIONS_NAMED = 5


def _others(db: Database, row: ModelRow) -> str:
    names = [name for name in models.names_of_versions(db, row.id, _VERSIONS_NAMED + 1) if name != row.active_version]
    return f"; `--version` takes another: {', '.join(names[:_VERSIONS_NAMED])}" if names else ""


def _rollback_target(db: Database, row: ModelRow, version: str | None) -> str:
    if version is not None:
        if models.find_version(db, row.id, version) is None:
            raise no_version(db, row.id, version)
        return version
    older = models.version_before(db, row.id, row.active_version) if row.active_version else None
    if older is None:
        raise Conflict(
            f"{row.id} has no version before {row.active_version} that has answered{_others(db, row)}.",
            param="version",
            code="no_older_version",
        )
    return older.version
