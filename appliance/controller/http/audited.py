"""Writes an audit row for every request that changes something, on every route.

All routes except reading ones pass through `audited`, because a new route could forget a call of its own. A handler
with more detail records its own row (`audit.record`), and then none is added. A handler that is `unaudited` has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.controller.context import audit
from appliance.controller.interfaces.principal import named_principal
from appliance.store.errors import UnknownCursor

# Errors of a request that has changed nothing; so has a client that disconnects during its body.
_REFUSALS = (HTTPException, RequestValidationError, UnknownCursor, ClientDisconnect)
READS = frozenset({"GET", "HEAD", "OPTIONS"})
_VERBS = {"POST": "update", "PATCH": "update", "PUT": "set", "DELETE": "delete"}
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Audit:
    """How the routes of one router are named. noun: "file" of "file.create". prefix: the router's. fields: of the
    answer, kept in the row's detail."""

    noun: str
    prefix: str
    fields: tuple[str, ...] = ()

    def action(self, method: str, path: str) -> str:
        """ "noun.verb": the verb is the last part of the path, or follows from the method."""
        if not self.noun:
            return f"{method.lower()} {path}"
        last = path.removeprefix(self.prefix).rpartition("/")[2]
        verb = "create" if not last else _VERBS[method] if last.startswith("{") else last
        return f"{self.noun}.{verb}"


def unaudited(endpoint: Endpoint) -> Endpoint:
    """A route that leaves no audit row. Say why."""
    endpoint.unaudited = True  # type: ignore[attr-defined]
    return endpoint


def is_unaudited(endpoint: Callable[..., Any]) -> bool:
    return hasattr(endpoint, "unaudited")


def audited(
    handle: Callable[[Request], Awaitable[Response]], endpoint: Callable[..., Any], named: Audit, method: str, path: str
) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler, followed by its audit row: "done" once it has answered, "failed" after an internal error. A
    refusal leaves no row."""
    if method in READS or is_unaudited(endpoint):
        return handle

    async def told(request: Request) -> Response:
        with audit.recording() as recorded:
            try:
                response = await handle(request)
            except Exception as error:
                refused = isinstance(error, _REFUSALS) and getattr(error, "status_code", 400) < 500
                if not recorded and not refused:
                    _record(request, named.action(method, path), {}, error=f"{type(error).__name__}: {error}"[:500])
                raise
            if not recorded and response.status_code < 400:
                answer = _answer(response)
                detail = {name: answer[name] for name in named.fields if answer.get(name) is not None}
                _record(request, named.action(method, path), answer, **detail)
            return response

    return told


def _record(request: Request, action: str, answer: dict[str, Any], **detail: Any) -> None:
    target = "/".join(str(value) for value in request.path_params.values())
    audit.record(
        request.app.state.context,
        named_principal(request),
        action,
        target or str(answer.get("id") or answer.get("name") or ""),
        outcome="failed" if "error" in detail else "done",
        **detail,
    )


def _answer(response: Response) -> dict[str, Any]:
    """A JSON object; empty for other answers."""
    is_json = response.headers.get("content-type") == "application/json" and not isinstance(response, StreamingResponse)
    found = orjson.loads(response.body) if is_json else None
    return found if isinstance(found, dict) else {}
