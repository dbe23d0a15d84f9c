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
from fastapi.responses import StreamingResponse

from appliance.controller.context import audit
from appliance.controller.interfaces.principal import named_principal

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
    """The route's handler, followed by its audit row once it has answered. A refusal leaves no row, and an internal
    error is in the log."""
    if method in READS or is_unaudited(endpoint):
        return handle

    async def told(request: Request) -> Response:
        with audit.recording() as recorded:
            response = await handle(request)
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
        **detail,
    )


def _answer(response: Response) -> dict[str, Any]:
    """A JSON object; empty for other answers."""
    is_json = response.headers.get("content-type") == "application/json" and not isinstance(response, StreamingResponse)
    found = orjson.loads(response.body) if is_json else None
    return found if isinstance(found, dict) else {}
