"""Routes of the control plane: each change is audited, and a parser with limits reads request bodies instead of the
standard library's.

`json.loads` accepts NaN, 5,000-digit integers and lone surrogates, and fails with RecursionError on 100,000 brackets;
orjson refuses all of them with a position. The hook is FastAPI's documented custom Request and APIRoute class
(https://fastapi.tiangolo.com/how-to/custom-request-and-route/).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from appliance.controller.http.audited import audited
from appliance.controller.interfaces.errors import BadRequest
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.payload.body_weight import check_weight

# As for inference requests: a list or object counts as 12, a string as 4, any other value as 1.
JSON_WEIGHT = 1 << 19


def check_values(text: bytes, most: int = JSON_WEIGHT) -> None:
    """Raises BadRequest for JSON with more values than may be parsed on a loop with other tasks."""
    try:
        check_weight(text, most)
    except gateway_errors.HttpError as error:
        raise BadRequest(error.message, code=error.code) from None


class StrictRequest(Request):
    async def json(self) -> Any:
        # JSONDecodeError of orjson is one of json's, which FastAPI turns into a RequestValidationError.
        body = await self.body()
        check_values(body)
        return orjson.loads(body)


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        (method,) = self.methods
        return audited(strict, method, self.path)
