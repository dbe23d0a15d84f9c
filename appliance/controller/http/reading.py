"""Answers requests on threads: what a route finds in the store, and the JSON of it.

A route does it by being `def` instead of `async def`. It then gets what it needs of the loop's own state as a parameter
(`Status`, `Readings`), which is taken on the loop before. A coroutine with more to ask of the loop ends with `answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request, Response
from starlette.requests import ClientDisconnect

from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from runtime.devices.kind import Reading

T = TypeVar("T")
DATABASE: ContextVar[Database] = ContextVar("database")
"""Set by StrictRoute for the task of each request."""


async def answer(db: Database, work: Callable[[], Any]) -> Response:
    """What `work` finds in the state of one moment, as JSON."""
    return await asyncio.to_thread(_response, db, work)


def of_one_moment(endpoint: Callable[..., Any]) -> Callable[..., Response]:
    """An endpoint for FastAPI's threads that only reads."""

    @wraps(endpoint)
    def answered(**values: Any) -> Response:
        return _response(DATABASE.get(), lambda: endpoint(**values))

    return answered


def _response(db: Database, work: Callable[[], Any]) -> Response:
    with db.snapshot():
        found = work()
    return found if isinstance(found, Response) else Response(orjson.dumps(found), media_type="application/json")


async def _readings(request: Request) -> Mapping[str, Reading]:
    return request.app.state.context.health.newest()


async def _status(request: Request) -> SchedulerStatus:
    return request.app.state.context.scheduler.status()


Status = Annotated[SchedulerStatus, Depends(_status)]
"""The scheduler's status as of the request."""
Readings = Annotated[Mapping[str, Reading], Depends(_readings)]
"""The newest reading of each device that reports any, as of the request."""


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises. Starlette lets a handler run on once its client has left, or was cut off: call
    this where it computes for minutes, and when the request's body is read. Raises ClientDisconnect."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
