"""The audit log: one row for every change. Requests that are refused are in the gateways' access log.

`appliance.controller.http.routers` ensures that every route writes one.
"""

from __future__ import annotations

from typing import Any, Literal

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import Principal
from appliance.store.records import audit, keys
from appliance.store.rows import AuditRow


def name_of(context: ControllerContext, caller: Principal) -> str:
    """The name of the caller's key; "box" for a command on the box itself, which needs none."""
    row = keys.find(context.db, caller.key_id) if caller.key_id else None
    return row.name if row else caller.key_id or "box"


def record(
    context: ControllerContext,
    caller: Principal,
    action: str,
    target: str,
    *,
    outcome: Literal["done", "refused", "failed"] = "done",
    **detail: Any,
) -> None:
    """action: "noun.verb", for example "key.create". detail: the request's parameters; never a secret."""
    caller.recorded.append(action)
    audit.insert(context.db, AuditRow(action, target, outcome, detail, caller.key_id, caller.request_id))
