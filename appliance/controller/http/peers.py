"""Identifies the peer of a request by the socket it arrived on, never by missing headers; and each request by an id.

The controller listens on two Unix sockets. `controller.sock` is for the machine's users who own the box, their commands
and the main process: without an identity they are the box itself, which may do everything. `gateway.sock` is for
gateways: each request head names a key and its scopes, and proves with a token that a gateway wrote it. Other heads are
refused before routing. (A missing identity once meant the box itself: whoever got a gateway to interpret a request body
as a head was the administrator.)
"""

from __future__ import annotations

import re
import secrets
from hmac import compare_digest

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.controller.interfaces.errors import Unauthorized
from appliance.controller.interfaces.principal import ADMIN, Principal
from runtime.logs import REQUEST_ID

KEY_ID, SCOPES, TOKEN = b"x-appliance-key-id", b"x-appliance-scopes", b"x-appliance-gateway"
SESSION = b"x-appliance-session"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")


class Listener:
    """The app behind one socket, mode 0600. token: known only to this box's gateways, on theirs; None on that of the
    box's users, where an identity is trusted, and none means the box itself.

    Every answer has `x-request-id`: the gateway's if it is well-formed, else a new one."""

    def __init__(self, app: ASGIApp, token: str | None = None):
        assert token != "", "with an empty token any head would do"
        self._app, self._token = app, None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = next(iter(_values(scope, b"x-request-id")), b"")
        if not _REQUEST_ID.match(request_id):
            request_id = b"req_" + secrets.token_hex(12).encode()
        REQUEST_ID.set(request_id.decode())  # of this request's own task

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        caller, tokens = _caller_of(scope, request_id.decode()), _values(scope, TOKEN)
        if self._token is None and not _values(scope, KEY_ID, SCOPES):
            caller = Principal(None, frozenset({ADMIN}), request_id.decode(), "")
        elif self._token is not None and (len(tokens) != 1 or not compare_digest(tokens[0], self._token)):
            caller = None
        if caller is None:
            error = Unauthorized()
            # Closed: after a head that no gateway wrote, the framing of this connection cannot be trusted.
            answer = JSONResponse(error.body(), error.status_code, {"connection": "close"})
            await answer(scope, receive, send_with_id)
            return
        scope.setdefault("state", {})["principal"] = caller
        await self._app(scope, receive, send_with_id)


def _caller_of(scope: Scope, request_id: str) -> Principal | None:
    """The identity from exactly one header of each kind, of sessions at most one; None for anything else."""
    key_ids, scopes, sessions = _values(scope, KEY_ID), _values(scope, SCOPES), _values(scope, SESSION)
    if len(key_ids) != 1 or len(scopes) != 1 or not key_ids[0].strip() or len(sessions) > 1:
        return None
    granted = (name.strip() for name in scopes[0].decode("latin-1").split(","))
    session = sessions[0].decode("latin-1").strip() if sessions else None
    key_id = key_ids[0].decode("latin-1").strip()
    return Principal(key_id, frozenset(name for name in granted if name), request_id, "", session)


def _values(scope: Scope, *names: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name in names]
