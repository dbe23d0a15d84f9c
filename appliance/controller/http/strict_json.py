"""Routes of the control plane: bounded bodies that orjson parses, reads on threads, and the audit row of each change.

`json.loads` accepts NaN, 5,000-digit integers and lone surrogates, and fails with RecursionError on 100,000 brackets;
orjson refuses all of them with a position. The hook is FastAPI's documented custom Request and APIRoute class
(https://fastapi.tiangolo.com/how-to/custom-request-and-route/).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from inspect import iscoroutinefunction
from typing import Any, ClassVar

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from appliance.controller.http.audited import Audit, audited
from appliance.controller.http.reading import DATABASE, of_one_moment
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import BadRequest, BodyTooLarge
from weights.format.foreign_json import is_deeper

KIB, MIB = 1 << 10, 1 << 20
MAX_BYTES = 256 * KIB
"""Of a body of a route that is not in MAX_BYTES_OF."""
MAX_BYTES_OF: Mapping[str, int] = {
    # A grader has 2 MiB at most (train.graders).
    "/v1/fine_tuning/jobs": 3 * MIB,
    "/v1/fine_tuning/alpha/graders/validate": 3 * MIB,
    "/v1/fine_tuning/alpha/graders/run": 3 * MIB,
    "/v1/evals": 3 * MIB,
    # More items than these come as a file, which is read line by line.
    "/v1/evals/{eval_id}/runs": 3 * MIB,
    # Names of 10,000 parts.
    "/v1/uploads/{upload_id}/complete": MIB,
    # A whole request of inference, in background.
    "/v1/responses": 2 * MIB,
    # A gateway's copies of answers: as a request of inference and its answer may be.
    "/internal/responses": 64 * MIB,
    # A chat template.
    "/admin/v1/models/{name:path}/settings": MIB,
}
FORM_BYTES = 64 * KIB
"""Of a form that has a file, apart from the file."""
MAX_DEPTH = 160
"""Levels: orjson reads 1,024 and writes 254."""
_PARSED_HERE = 64 * KIB
"""A body of this size takes less time than a change of threads."""


def max_bytes(path: str, config: ControllerConfig) -> int:
    """Of a body. path: the route's, with its parameters' names."""
    if path == "/v1/files":
        return config.upload_bytes + FORM_BYTES
    if path == "/v1/uploads/{upload_id}/parts":
        return config.upload_part_bytes + FORM_BYTES
    return MAX_BYTES_OF.get(path, MAX_BYTES)


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
        try:
            return parsed(body) if len(body) <= _PARSED_HERE else await asyncio.to_thread(parsed, body)
        except orjson.JSONDecodeError as error:
            reason = error.msg
        # Not FastAPI's error, which keeps the body as a text, and itself in a cycle.
        raise BadRequest(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")


def parsed(text: bytes) -> Any:
    """Raises BadRequest for too many levels, orjson.JSONDecodeError for what is not JSON."""
    found = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_deeper(found, MAX_DEPTH):
        raise BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return found


class StrictRoute(APIRoute):
    """A route with one method. One whose endpoint is not a coroutine only reads, and runs on a thread."""

    audit: ClassVar[Audit] = Audit("", "")

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        """options: of APIRoute, as APIRouter gives them."""
        super().__init__(path, endpoint if iscoroutinefunction(endpoint) else of_one_moment(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            context = request.app.state.context
            DATABASE.set(context.db)
            return await handle(StrictRequest(request.scope, request.receive, max_bytes(self.path, context.config)))

        (method,) = self.methods
        return audited(strict, self.endpoint, self.audit, method, self.path)
