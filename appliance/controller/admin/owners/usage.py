"""/admin/v1/usage: spending by key, owner, model, version or hour; of one's own keys, or of all for `read`."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import READ, Caller
from appliance.store.records import usage


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""

    @router.get("/usage")
    def report(
        caller: Caller,
        by: Literal["key", "owner", "model", "version", "hour"] = "key",
        since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time; its hour counts whole")] = 0.0,
    ) -> dict[str, Any]:
        """Requests and tokens of inference, and device-hours of training: up to date to within a second. `by=hour`
        lists the newest 2,400 hours in which there was any.

        A key that is neither an admin's nor of scope `read` sees what its owner's keys spent."""
        now_s = time.time()
        owner = None if caller.may(READ) else caller.owner

        rows = [dataclasses.asdict(row) for row in usage.report(context.db, by, since_s, now_s, owner)]
        return {"object": "list", "by": by, "since_s": since_s, "until_s": now_s, "data": rows}
