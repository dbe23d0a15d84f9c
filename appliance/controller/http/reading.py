"""Answers requests that only read: the query, what is made of its rows, and the JSON of it, on a thread of the store's.

A route does it by being no coroutine: `def` instead of `async def`. It then gets what it needs of the loop's own state
as a parameter (`Status`, `Readings`), which is taken on the loop before. One that has more to ask of the loop is a
coroutine and ends with `answer`. Which coroutines read on the loop themselves, and why they may, stands in
tests/unit/controller/test_reading_routes.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response

from appliance.controller.interfaces.ports import SchedulerStatus
from appliance.controller.interfaces.principal import viewer_of_request
from appliance.store.database import Database
from runtime.devices.kind import Reading

REQUEST: ContextVar[Request] = ContextVar("request")
"""The request that this task answers; set by StrictRoute."""


async def answer(db: Database, whose: str | None, work: Callable[[], Any]) -> Response:
    """What `work` finds, as JSON. whose: as in Database.read."""
    return await db.read(whose, _response, work)


def on_a_thread(endpoint: Callable[..., Any]) -> Callable[..., Awaitable[Response]]:
    """The endpoint as a coroutine that FastAPI calls on the loop."""

    @wraps(endpoint)
    async def answered(**values: Any) -> Response:
        request = REQUEST.get()
        return await answer(request.app.state.context.db, viewer_of_request(request), partial(endpoint, **values))

    return answered


def _response(work: Callable[[], Any]) -> Response:
    found = work()
    return found if isinstance(found, Response) else Response(orjson.dumps(found), media_type="application/json")


async def _readings(request: Request) -> Mapping[str, Reading]:
    return request.app.state.context.device_readings()


async def _status(request: Request) -> SchedulerStatus:
    return request.app.state.context.scheduler.status()


Status = Annotated[SchedulerStatus, Depends(_status)]
"""The scheduler's status as of the request."""
Readings = Annotated[Mapping[str, Reading], Depends(_readings)]
"""The newest reading of each device that reports any, as of the request."""
