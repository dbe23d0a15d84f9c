"""How a login of the page begins, and how it is shown: for people who bring a key and for those who come by a login
provider."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response

from appliance.controller.context.context import ControllerContext
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
