"""Limits what a job may claim over others by the `max_priority` of its key; admins have no limit.

A key whose jobs may have a priority above 0 may also make jobs that are not preemptible, or have a deadline.
"""

from __future__ import annotations

from typing import Any

from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.requests import JobCreate
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import JobRow


class ClaimRefused(ApiError):
    def __init__(self, told: str, param: str):
        super().__init__(
            403,
            f"{told} An operator can raise that (`appliance key limit NAME --max-priority N`).",
            param=param,
            code="insufficient_permissions",
        )


def taken_over(db: Database, row: JobRow, caller: Principal) -> dict[str, Any]:
    """Changes of a paused job whose key was revoked when the caller resumes it: it becomes a job of the caller's key,
    and loses what that key may not claim. Nothing if its key lives, or an admin resumes it."""
    if caller.is_admin or not keys.is_revoked(db, row.key_id):
        return {}
    most, changes = _max_priority(db, caller), {"key_id": caller.key_id}
    claims = {"priority": min(row.priority, most), **({"preemptible": 1, "deadline_s": None} if most <= 0 else {})}
    return changes | {name: value for name, value in claims.items() if getattr(row, name) != value}


def _max_priority(db: Database, caller: Principal) -> int:
    key = keys.find(db, caller.key_id) if caller.key_id else None
    return 0 if key is None else key.max_priority


def check(db: Database, request: JobCreate, caller: Principal) -> None:
    """Raises ClaimRefused."""
    if caller.is_admin:
        return
    most = _max_priority(db, caller)
    if request.priority > most:
        raise ClaimRefused(
            f"priority is {request.priority}; jobs of this API key have at most {most}.",
            "priority",
        )
    for param, claimed in (("preemptible", not request.preemptible), ("deadline_s", request.deadline_s is not None)):
        if claimed and most <= 0:
            raise ClaimRefused(f"Only jobs of keys with a priority above 0 may set {param!r}.", param)
