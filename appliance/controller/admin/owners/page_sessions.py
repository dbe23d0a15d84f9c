"""/admin/v1/sessions: logins of the page. A key is exchanged for one, so that a browser need not keep the key; what a
login may do is what its key may. Its owner lists them and ends them; the end of its key is theirs."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.routers import needs, unaudited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import ApiError, NotFound, shown
from appliance.controller.interfaces.principal import ANY, Caller
from appliance.store.records import keys, page_sessions
from appliance.store.rows import PageSessionRow, columns

IDLE_S = 8 * 3600.0
"""Without a touch of its person's."""
LONGEST_S = 7 * 86400.0
MOST_OF_A_KEY = 16
"""Past it, the one that was touched longest ago ends."""
COOKIE = "x-appliance-cookie"
"""For the gateway, which makes a cookie of it (`gateway.server.controller`); no client sees it."""
_AGENT_CHARACTERS = 200
MOVED_BY_S = 300.0
"""A smaller step of its end is not worth a table for all gateways."""


class SessionBegin(StrictBody):
    """secure: the page came by https, if only as far as a proxy; the cookie then never travels otherwise."""

    secure: bool = False


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.post("/sessions", status_code=201)
    @needs(*ANY)
    async def exchange(body: SessionBegin, request: Request, response: Response, caller: Caller) -> dict[str, Any]:
        """`page`: the half of its token that the page keeps and sends as `x-appliance-page: ID.HALF`; the other half is
        in a cookie. Neither is shown again."""
        if caller.key_id is None or caller.session is not None or keys.find(db, caller.key_id) is None:
            raise ApiError(
                403, "A login of the page begins with an API key of its own.", code="insufficient_permissions"
            )
        made = begin(context, caller.key_id, request, response, secure=body.secure)
        record(context, caller, "session.create", made["id"], key=made["key"], agent=made["agent"])
        return made

    @router.get("/sessions")
    @needs(*ANY)
    def list_sessions(caller: Caller) -> dict[str, Any]:
        rows = page_sessions.list_live(db, time.time(), caller.viewer)
        return {"object": "list", "data": [view(context, row) for row in rows]}

    @router.post("/sessions/{session_id}/touch")
    @needs(*ANY)
    @unaudited  # its person is still at the page
    async def touch(session_id: str, caller: Caller) -> dict[str, Any]:
        """Its person is there: its end moves on, at most to seven days after its beginning."""
        row = page_sessions.find(db, session_id)
        if row is None or row.id != caller.session:
            raise _unknown(session_id)
        now_s = time.time()
        until_s = min(now_s + IDLE_S, row.created_s + LONGEST_S)
        if until_s - row.until_s >= MOVED_BY_S:
            page_sessions.update(db, row.id, seen_s=now_s, until_s=until_s)
            context.spending.publish_keys()
        return view(context, page_sessions.find(db, row.id) or row)

    @router.delete("/sessions/{session_id}")
    @needs(*ANY)
    async def end(session_id: str, response: Response, caller: Caller) -> dict[str, Any]:
        row = page_sessions.find(db, session_id)
        if row is None or (caller.viewer is not None and keys.owner_of(db, row.key_id) != caller.viewer):
            raise _unknown(session_id)
        # At once, however many were begun: the next beginning waits for it.
        page_sessions.end(db, row.id)
        record(context, caller, "session.end", row.id)
        context.spending.publish_keys()
        if row.id == caller.session:
            response.headers[COOKIE] = f"{row.id}=; Max-Age=0"
        return {"id": row.id, "object": "session", "deleted": True}


def begin(
    context: ControllerContext, key_id: str, request: Request, response: Response, *, secure: bool
) -> dict[str, Any]:
    """A new login of this key, as the API shows it, with the page's half of the token; the other half is in a header of
    the response. secure: the cookie travels by TLS alone."""
    now_s, agent = time.time(), request.headers.get("user-agent", "")[:_AGENT_CHARACTERS]
    row, halves = page_sessions.create(
        context.db, key_id, agent=agent, now_s=now_s, until_s=now_s + IDLE_S, most=MOST_OF_A_KEY
    )
    context.spending.publish_keys()
    response.headers[COOKIE] = f"{row.id}={halves.cookie}; Max-Age={LONGEST_S:.0f}{'; Secure' if secure else ''}"
    return view(context, row) | {"page": halves.page}


def view(context: ControllerContext, row: PageSessionRow) -> dict[str, Any]:
    key = keys.find(context.db, row.key_id)
    return {
        "id": row.id,
        "object": "session",
        "key_id": row.key_id,
        "key": key.name if key else None,
        "owner": keys.owner_of(context.db, row.key_id),
        **columns(row, "agent created_s seen_s until_s"),
        "ends_s": row.created_s + LONGEST_S,
    }


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Forget those whose time is over, also at gateways, which then cut off what they still ask."""
    if page_sessions.forget_ended(context.db, now_s):
        context.spending.publish_keys()


def _unknown(session_id: str) -> NotFound:
    return NotFound(f"No login of the page with the id {shown(session_id)}.", param="id", code="session_not_found")
