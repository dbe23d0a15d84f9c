"""Pure ASGI middleware: request ids in and out, and answers of changes that gateways know.

Not `@app.middleware("http")`: with that, an exception reached clients as a clean end of the body.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.logs import REQUEST_ID

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")


class RequestIds:
    """Sets `x-request-id` on every answer: the gateway's if it is well-formed, else a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.match(given) else b"req_" + secrets.token_hex(12).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        REQUEST_ID.set(request_id.decode())  # of this request's own task

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class KnownAtGateways:
    """Answers a change once the gateways know it: the next request, for a new key or a canary, may follow at once."""

    def __init__(self, app: ASGIApp, caught_up: Callable[[], Awaitable[None]]):
        self._app = app
        self._caught_up = caught_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return

        async def send_when_known(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                await self._caught_up()
            await send(message)

        await self._app(scope, receive, send_when_known)
