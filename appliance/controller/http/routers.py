"""The routers of the control plane: required scopes, bounded bodies, reads on threads, an audit row of each change.

`json.loads` accepts NaN, 5,000-digit integers and lone surrogates, and fails with RecursionError on 100,000 brackets;
orjson refuses all of them with a position. The hook is FastAPI's documented custom Request and APIRoute class
(https://fastapi.tiangolo.com/how-to/custom-request-and-route/).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from inspect import iscoroutinefunction
from typing import Any, ClassVar

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from appliance.controller.http.audited import READS, Audit, audited
from appliance.controller.http.error_handlers import RESPONSES
from appliance.controller.http.reading import DATABASE, of_one_moment
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import BadRequest, BodyTooLarge
from appliance.controller.interfaces.principal import needs
from weights.format.foreign_json import is_deeper

MAX_BYTES = 3 << 20
"""Of a JSON body: a grader has 2 MiB at most (train.graders), and more than this comes as a file."""
MAX_COPIES_BYTES = 64 << 20
"""Of a gateway's copies of answers."""
FORM_BYTES = 64 << 10
"""Of a form that has a file, apart from the file."""
MAX_DEPTH = 160
"""Levels: orjson reads 1,024 and writes 254."""
_PARSED_HERE = 64 << 10
"""A body of this size takes less time than a change of threads."""


def make_router(
    prefix: str,
    *scopes: str,
    noun: str = "",
    fields: tuple[str, ...] = (),
    check: Callable[..., Awaitable[Any]] | None = None,
) -> APIRouter:
    """A router whose routes require one of `scopes`, or admin; without scopes each route decides, or `check`, a
    dependency, does. noun, fields: of the audit rows of its changes (`Audit`)."""

    class Route(StrictRoute):
        audit = Audit(noun, prefix, fields)

    check = needs(*scopes) if scopes else check
    dependencies = [Depends(check)] if check is not None else []
    return APIRouter(prefix=prefix, route_class=Route, responses=RESPONSES, dependencies=dependencies)


def max_bytes(path: str, config: ControllerConfig) -> int:
    """Of a body. path: the route's, with its parameters' names."""
    if path == "/v1/files":
        return config.upload_bytes + FORM_BYTES
    if path == "/v1/uploads/{upload_id}/parts":
        return config.upload_part_bytes + FORM_BYTES
    return MAX_COPIES_BYTES if path == "/internal/responses" else MAX_BYTES


class StrictRequest(Request):
    """A request whose body has at most `most` bytes. Raises BodyTooLarge as soon as that is known."""

    def __init__(self, scope: Scope, receive: Receive, most: int):
        super().__init__(scope, receive)
        self._most = most
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise BodyTooLarge(most)

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > self._most:
                raise BodyTooLarge(self._most)
            yield chunk

    async def json(self) -> Any:
        """Raises BadRequest."""
        body = await self.body()
        return parsed(body) if len(body) <= _PARSED_HERE else await asyncio.to_thread(parsed, body)


def parsed(text: bytes) -> Any:
    """Raises BadRequest."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason = error.msg
    else:
        if text.count(b"[") + text.count(b"{") <= MAX_DEPTH or not is_deeper(found, MAX_DEPTH):
            return found
        reason = f"it is nested deeper than {MAX_DEPTH} levels"
    # Not orjson's error, which keeps the body as a text, and itself in a cycle.
    raise BadRequest(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")


class StrictRoute(APIRoute):
    """A route with one method. One whose endpoint is not a coroutine only reads, and runs on a thread. A change is
    answered once the gateways know it."""

    audit: ClassVar[Audit] = Audit("", "")

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        """options: of APIRoute, as APIRouter gives them."""
        super().__init__(path, endpoint if iscoroutinefunction(endpoint) else of_one_moment(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, (method,) = super().get_route_handler(), self.methods

        async def strict(request: Request) -> Response:
            context = request.app.state.context
            DATABASE.set(context.db)
            most = max_bytes(self.path, context.config)
            response = await handle(StrictRequest(request.scope, request.receive, most))
            if method not in READS and response.status_code < 400:
                # The next request, for a new key or a canary, may follow at once.
                await context.bus.caught_up()
            return response

        return audited(strict, self.endpoint, self.audit, method, self.path)
