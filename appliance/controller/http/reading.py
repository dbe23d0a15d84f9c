"""Answers requests on threads: what a route finds in the store, and the JSON of it.

A route does it by being `def` instead of `async def`. It then gets what it needs of the loop's own state as a parameter
(`Status`, `Readings`), which is taken on the loop before. A coroutine with more to ask of the loop ends with `answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response

from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from runtime.devices.kind import Reading

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
