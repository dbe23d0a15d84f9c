"""Routes of the control plane: each change is audited, and a parser with limits reads request bodies instead of the
standard library's.

`json.loads` accepts NaN, 5,000-digit integers and lone surrogates, and fails with RecursionError on 100,000 brackets;
orjson refuses all of them with a position. The hook is FastAPI's documented custom Request and APIRoute class
(https://fastapi.tiangolo.com/how-to/custom-request-and-route/).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import iscoroutinefunction
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import compile_path, get_name
from starlette.types import Receive, Scope

from appliance.controller.http.audited import audited
from appliance.controller.http.bodies import Bound, bound_of, parsed
from appliance.controller.http.reading import DATABASE, of_one_moment
from appliance.controller.interfaces.errors import BadRequest, BodyTooLarge


class StrictRequest(Request):
    """`body` and `json` are bounded; a route that takes a file reads `stream`, whose bound BodyLimits keeps."""

    def __init__(self, scope: Scope, receive: Receive, bound: Bound):
        super().__init__(scope, receive)
        self._bound = bound

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            most = self._bound.nbytes
            announced = self.headers.get("content-length", "0")
            if announced.isdigit() and int(announced[:20]) > most:
                raise BodyTooLarge(most)
            chunks, size = [], 0
            async for chunk in self.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > most:
                    raise BodyTooLarge(most)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        try:
            return await parsed(await self.body(), self._bound.weight)
        except orjson.JSONDecodeError as error:
            reason = error.msg
        # Not FastAPI's error, which keeps the body as a text, and itself in a cycle: 15 MiB for each body of 3 MiB, and
        # whoever sent many had the controller hold 3 GiB until the collector came.
        raise BadRequest(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")


class StrictRoute(APIRoute):
    """A route that is built when something of it is first asked for: a request, or the OpenAPI document.

    What routing asks of every route is there at once. FastAPI's part (signatures, dependencies, an adapter of
    pydantic's for each parameter) takes 2 ms of processor time a route; all hundred of them made the controller start a
    fifth of a second later. A route that FastAPI refuses is found by a test that builds all of them
    (tests/unit/controller/test_strict_routes.py).
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        """options: of APIRoute, as APIRouter gives them."""
        if not iscoroutinefunction(endpoint):
            endpoint = of_one_moment(endpoint)
        self._options = options
        self.path, self.endpoint, self.name = path, endpoint, options.get("name") or get_name(endpoint)
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = {method.upper() for method in options.get("methods") or ("GET",)}

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet. Raises what APIRoute raises, each time that it is asked for."""
        options = vars(self).pop("_options", None)
        if options is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        try:
            super().__init__(self.path, self.endpoint, **options)
        except BaseException:
            self._options = options
            raise
        return getattr(self, name)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, bound = super().get_route_handler(), bound_of(self.path)

        async def strict(request: Request) -> Response:
            DATABASE.set(request.app.state.context.db)
            return await handle(StrictRequest(request.scope, request.receive, bound))

        (method,) = self.methods
        return audited(strict, method, self.path)
