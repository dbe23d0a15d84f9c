"""How a login of the page begins, and how it is shown: for people who bring a key and for those who come by a login
provider."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

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


class Begun(NamedTuple):
    """shown: as the API shows it, with the page's half of the token. cookie: what COOKIE has, with the other half."""

    shown: dict[str, Any]
    cookie: str


def begin(context: ControllerContext, key_id: str, *, agent: str, secure: bool) -> Begun:
    """A new login of this key. secure: the cookie travels by TLS alone."""
    now_s = time.time()
    row, halves = page_sessions.create(
        context.db,
        key_id,
        agent=agent[:_AGENT_CHARACTERS],
        now_s=now_s,
        until_s=now_s + IDLE_S,
        most=MOST_OF_A_KEY,
    )
    context.spending.publish_keys()
    more = "; Secure" if secure else ""
    cookie = f"{row.id}={halves.cookie}; Max-Age={LONGEST_S:.0f}{more}"
    return Begun(shown(context, row) | {"page": halves.page}, cookie)


def shown(context: ControllerContext, row: PageSessionRow) -> dict[str, Any]:
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
