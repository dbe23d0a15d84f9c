"""Pure ASGI middleware: request ids in and out, answers of changes that gateways know, and a limit on body sizes.

Not `@app.middleware("http")`: with that, an exception reached clients as a clean end of the body.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.controller.http.bodies import bound_of
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import ApiError, BodyTooLarge
from appliance.controller.interfaces.identity import ADMIN, GATEWAY, Identity
from runtime.logs import REQUEST_ID

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_MULTIPART_OVERHEAD_BYTES = 64 * 1024
# Copies of answered responses, from gateways, which limit how much of them they buffer.
_COPIES = "/internal/responses"
MOST_IN_FLIGHT = 1024
"""As many as one owner may have at one time: a gateway takes 20 in a second."""
_UPLOAD_PART = re.compile(r"/v1/uploads/[^/]+/parts\Z")


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


class InFlight:
    """Refuses further requests of an owner who has many here, those included that nobody waits for any more: a gateway
    counts a request no longer once its client has left, and its handler goes on. Administrators are not counted.

    owner_of: the owner of a key's id."""

    def __init__(self, app: ASGIApp, owner_of: Callable[[str], str], most: int = MOST_IN_FLIGHT):
        self._app, self._owner_of, self._most = app, owner_of, most
        self._here: Counter[str] = Counter()  # by owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key_id = _bounded(scope)
        if key_id is None or key_id == GATEWAY:  # for itself it asks little, and one thing after the other
            await self._app(scope, receive, send)
            return
        owner = self._owner_of(key_id)
        if self._here[owner] >= self._most:
            text = f"{self._most} requests of your keys are under way. Please wait for their answers."
            error = ApiError(429, text, kind="requests", code="too_many_requests", headers={"retry-after": "5"})
            await JSONResponse(error.body(), error.status_code, error.headers)(scope, receive, send)
            return
        self._here[owner] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._here[owner] -= 1
            if not self._here[owner]:
                del self._here[owner]


def _bounded(scope: Scope) -> str | None:
    """The key that asks, whose owner is bounded; None: nobody is."""
    identity = scope.get("state", {}).get("identity")
    if scope["type"] != "http" or not isinstance(identity, Identity) or ADMIN in identity.scopes:
        return None
    return identity.key_id


class BodyLimits:
    """Refuses bodies over the endpoint's limit: at once by their announced length, else when they exceed it."""

    def __init__(self, app: ASGIApp, config: ControllerConfig):
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_bytes(scope)
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            error = BodyTooLarge(limit)
            await JSONResponse(error.body(), error.status_code)(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise BodyTooLarge(limit)
            return message

        await self._app(scope, receive_counted, send)

    def _limit_bytes(self, scope: Scope) -> int:
        if scope["method"] == "POST" and scope["path"] == "/v1/files":
            return self._config.upload_bytes + _MULTIPART_OVERHEAD_BYTES
        if scope["method"] == "POST" and _UPLOAD_PART.match(scope["path"]):
            return self._config.upload_part_bytes + _MULTIPART_OVERHEAD_BYTES
        if scope["path"] == _COPIES:
            return bound_of(_COPIES).nbytes
        return self._config.json_body_bytes
