"""/admin/v1/models/{name}/canary and /promote: gives a version a share of its model's requests before it gets all."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models.canaries import Canaries
from appliance.store.objects import models
from appliance.store.records import canaries
from appliance.store.rows import CanaryRow


class Canary(StrictBody):
    """share: fraction of the requests, 0.1 for one in ten. watch_s: how long it is watched, in seconds."""

    version: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    auto: bool = False
    watch_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 50


def routes(context: ControllerContext, router: APIRouter, running: Canaries) -> None:
    """Add the routes to the admin router; before those of models, whose names may contain slashes."""
    db = context.db

    def last(name: str) -> CanaryRow:
        row = canaries.find(db, name)
        if row is None:
            raise NotFound(
                f"{shown(name)} has no canary, and never had one; `appliance model canary MODEL VERSION` begins one.",
                param="model",
                code="no_canary",
            )
        return row

    @router.put("/models/{name:path}/canary")
    async def begin(name: str, body: Canary, caller: Caller) -> dict[str, Any]:
        found, now_s = models.find(db, name), time.time()
        running.begin(
            CanaryRow(
                model=name,
                before=(found.active_version if found else None) or "",
                created_s=now_s,
                **body.model_dump() | {"auto": int(body.auto)},
            ),
            caller,
        )
        return await running.view(last(name), now_s)

    @router.get("/models/{name:path}/canary")
    async def show(name: str) -> dict[str, Any]:
        return await running.view(last(name), time.time())

    @router.delete("/models/{name:path}/canary")
    async def roll_back(name: str, caller: Caller) -> dict[str, Any]:
        return await running.roll_back(name, caller)

    @router.post("/models/{name:path}/promote")
    async def promote(name: str, caller: Caller) -> dict[str, Any]:
        return await running.promote(name, caller)
