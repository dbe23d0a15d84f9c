"""The caller of a request, determined by its socket and never by missing headers; and an id for each request.

The controller listens on two Unix sockets. `controller.sock` is for the machine's users who own the box, their commands
and the main process: without an identity they are the box itself, which may do everything. `gateway.sock` is for
gateways: each request head names a key and its scopes, and proves with a token that a gateway wrote it. Other heads are
refused before routing: a body that a gateway took for a head must not become the administrator's request.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.controller.interfaces.errors import ApiError, KeyRevoked
from appliance.store import keys
from appliance.store.rows import PAGE_SESSIONS
from runtime.logs import REQUEST_ID

ADMIN, GATEWAY = "admin", "gateway"
FINE_TUNING, INFERENCE, READ, METRICS = "fine_tuning", "inference", "read", "metrics"
ANY = (READ, INFERENCE, FINE_TUNING, METRICS)
"""For what every key may do, however little else it may."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. key_id: None: a process of the box itself (its socket is 0600), which may do everything.
    A gateway acting for itself has GATEWAY as its key's id and as its only scope.

    owner: owns what this request creates; empty for the box itself. session: the login of the page by which the key's
    owner came, None: by the key. recorded: actions of this caller's that the audit log has, of this request.
    """

    key_id: str | None
    scopes: frozenset[str]
    request_id: str
    owner: str
    session: str | None = None
    recorded: list[str] = field(default_factory=list, compare=False)

    def may(self, *scopes: str) -> bool:
        """Return whether the caller has any of these scopes. An admin may do everything."""
        return self.is_admin or not self.scopes.isdisjoint(scopes)

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    @property
    def viewer(self) -> str | None:
        """For the store's `viewer`: the request sees only this owner's objects; None for an admin, who sees all."""
        return None if self.is_admin else self.owner


async def read_principal(request: Request) -> Principal:
    """Return the caller with its owner, which only the key's row has. Raises ApiError 401 for a key or login that ended
    before the request had fully arrived: gateways learn that a moment after the store."""
    caller, db = request.scope["state"]["principal"], request.app.state.context.db
    owner, ended = ("", "") if caller.key_id is None else keys.standing(db, caller.key_id)
    if ended:
        raise KeyRevoked(ended)
    if caller.session is not None:
        session = PAGE_SESSIONS.find(db, caller.session)
        if session is None or session.key_id != caller.key_id or session.until_s <= time.time():
            # In the words of `gateway.core.errors.session_ended`.
            raise ApiError(401, "This login of the page has ended. Log in again.", code="session_ended")
    request.scope["state"]["principal"] = caller = replace(caller, owner=owner)
    return caller


Caller = Annotated[Principal, Depends(read_principal)]


# --- the sockets

KEY_ID, SCOPES, TOKEN = b"x-appliance-key-id", b"x-appliance-scopes", b"x-appliance-gateway"
SESSION = b"x-appliance-session"
NO_IDENTITY = (
    "This request has no identity. Gateways send x-appliance-key-id and x-appliance-scopes, once each, with their "
    "token; commands on the box itself use its controller.sock."
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")


class Listener:
    """The app behind one socket, mode 0600. token: secret of this box's gateways, for their socket; None for the socket
    of the box's users, where a given identity is trusted and a missing one means the box itself.

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
        REQUEST_ID.set(request_id.decode())  # set in this request's own task

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
            error = ApiError(401, NO_IDENTITY, code="missing_identity")
            # Closed: after a head that no gateway wrote, the framing of this connection cannot be trusted.
            answer = JSONResponse(error.body(), error.status_code, {"connection": "close"})
            await answer(scope, receive, send_with_id)
            return
        scope.setdefault("state", {})["principal"] = caller
        await self._app(scope, receive, send_with_id)


def _caller_of(scope: Scope, request_id: str) -> Principal | None:
    """Return the identity from exactly one header of each kind (at most one for sessions); None for other headers."""
    key_ids, scopes, sessions = _values(scope, KEY_ID), _values(scope, SCOPES), _values(scope, SESSION)
    if len(key_ids) != 1 or len(scopes) != 1 or not key_ids[0].strip() or len(sessions) > 1:
        return None
    granted = (name.strip() for name in scopes[0].decode("latin-1").split(","))
    session = sessions[0].decode("latin-1").strip() if sessions else None
    key_id = key_ids[0].decode("latin-1").strip()
    return Principal(key_id, frozenset(name for name in granted if name), request_id, "", session)


def _values(scope: Scope, *names: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name in names]
