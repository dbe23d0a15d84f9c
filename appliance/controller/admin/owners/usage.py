"""/admin/v1/usage: spending by key, owner, model, version or hour; of one's own keys, or of all for `read`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from fastapi import APIRouter, Query, Response

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.reading import answer
from appliance.controller.interfaces.principal import READ, Caller
from appliance.store.records import usage


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    two, turns = asyncio.Semaphore(2), WeakValueDictionary[str | None, asyncio.Lock]()

    @router.get("/usage", response_model=dict[str, Any])
    async def report(
        caller: Caller,
        by: Literal["key", "owner", "model", "version", "hour"] = "key",
        since_s: Annotated[float, Query(ge=0, le=1e11, description="Unix time; its hour counts whole")] = 0.0,
    ) -> Response:
        """Requests and tokens of inference, and device-hours of training: up to date to within a second. `by=hour`
        lists the newest 2,400 hours in which there was any.

        A key that is neither an admin's nor of scope `read` sees what its owner's keys spent."""
        now_s = time.time()
        owner = None if caller.may(READ) else caller.owner

        def shown() -> dict[str, Any]:
            rows = [dataclasses.asdict(row) for row in usage.report(context.db, by, since_s, now_s, owner)]
            return {"object": "list", "by": by, "since_s": since_s, "until_s": now_s, "data": rows}

        # A year of twenty keys takes seconds, and shorter readings need threads too: two at once, and one of an owner,
        # so that an owner who asks many times waits for himself.
        turn = turns.setdefault(caller.viewer, asyncio.Lock())
        async with turn, two:
            return await answer(context.db, caller.viewer, shown)
