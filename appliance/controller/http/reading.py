"""Answers requests on threads: what a route finds in the store, and the JSON of it.

A route does it by being `def` instead of `async def`. It then gets what it needs of the loop's own state as a parameter
(`Status`, `Readings`), which is taken on the loop before. A coroutine with more to ask of the loop ends with `answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request, Response
from starlette.requests import ClientDisconnect

from appliance.controller.interfaces.records import SchedulerStatus
from runtime.devices.kind import Reading

T = TypeVar("T")


async def answer(work: Callable[[], Any]) -> Response:
    """The result of `work`, done on a thread, as JSON."""
    return await asyncio.to_thread(lambda: as_json(work()))


def on_a_thread(endpoint: Callable[..., Any]) -> Callable[..., Response]:
    """Make an endpoint that FastAPI runs on a thread."""

    @wraps(endpoint)
    def on_thread(**values: Any) -> Response:
        return as_json(endpoint(**values))

    return on_thread


def as_json(result: Any) -> Response:
    """Encode by orjson: FastAPI's own encoder takes ten times as long."""
    return result if isinstance(result, Response) else Response(orjson.dumps(result), media_type="application/json")


async def _readings(request: Request) -> Mapping[str, Reading]:
    return request.app.state.context.health.newest()


async def _status(request: Request) -> SchedulerStatus:
    return request.app.state.context.scheduler.status()


Status = Annotated[SchedulerStatus, Depends(_status)]
"""The scheduler's status as of the request."""
Readings = Annotated[Mapping[str, Reading], Depends(_readings)]
"""The newest reading of each device that reports any, as of the request."""


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. Starlette lets a handler run on once its client has left, or was cut off: call
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
