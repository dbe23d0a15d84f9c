"""/admin/v1/session-keys: keys for one command on the box itself, which calls the endpoint as a client would.

They allow inference only, belong to the box itself, and are deleted when the command ends; if the command was killed,
a day later. The audit log omits them: callers of these routes may do everything anyway.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from appliance.controller.admin.owners.key_ends import end_key
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.audited import unaudited
from appliance.controller.interfaces.errors import ApiError, NotFound, shown
from appliance.controller.interfaces.principal import INFERENCE, Caller
from appliance.store.records import keys, session_keys

KEPT_S = 24 * 3600.0
MAX_LIVE = 1000


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    db = context.db

    @router.post("/session-keys")
    @unaudited  # callers may do everything anyway, and its key only asks models
    async def create(caller: Caller) -> dict[str, Any]:
        """Only on the box itself: a network client already has a key."""
        if caller.key_id is not None:
            raise ApiError(
                403,
                "Keys for one command are made only on the box itself; use the key that you have.",
                code="insufficient_permissions",
            )
        if session_keys.count_live(db) >= MAX_LIVE:
            raise ApiError(
                429,
                f"{MAX_LIVE} commands on the box have a key. Please retry.",
                kind="requests",
                code="rate_limit_exceeded",
                headers={"retry-after": "10"},
            )
        row, key = keys.create(db, f"session-{time.time_ns():x}", [INFERENCE], session_keys.OWNER, session=1)
        context.spending.publish_keys()
        return {"id": row.id, "key": key}

    @router.delete("/session-keys/{key_id}")
    @unaudited
    async def end(key_id: str) -> dict[str, Any]:
        row = keys.find(db, key_id)
        if row is None or not row.session or row.id != key_id:
            raise NotFound(f"No key of a command with the id {shown(key_id)}.", param="key_id", code="key_not_found")
        end_key(context, row.id)
        context.spending.publish_keys()
        return {"id": row.id, "deleted": True}


def keep_house(context: ControllerContext, now_s: float) -> None:
    """Revoke keys whose command was killed, and delete ended ones a day later: their usage counts as the box's."""
    old = [row for row in keys.list_live(context.db) if row.session and row.created_s < now_s - KEPT_S]
    for row in old:
        end_key(context, row.id)
    if old:
        context.spending.publish_keys()
    session_keys.delete_responses(context.db, now_s - KEPT_S)
    session_keys.forget(context.db, now_s - KEPT_S)
