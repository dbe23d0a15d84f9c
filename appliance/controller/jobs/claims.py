"""Limits the priority a job may claim over others, by its key; admins have no limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.requests import JobCreate
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import keys
from appliance.store.rows import JobRow, KeyRow

LIMITS = ("max_priority", "max_non_preemptible", "max_deadlines", "max_held")
# For a key that is not in the store: the limits of a new key.
_DEFAULTS = KeyRow("", "", "", "", 0.0)
# For each limit on their number, the field, the description of such a job, and the test for it.
_COUNTED: tuple[tuple[str, str, str, Callable[[JobCreate | JobRow], bool]], ...] = (
    ("max_non_preemptible", "preemptible", "not preemptible", lambda job: not job.preemptible),
    ("max_deadlines", "deadline_s", "bound by a deadline", lambda job: job.deadline_s is not None),
    ("max_held", "held", "held", lambda job: bool(job.held)),
)


class ClaimRefused(ApiError):
    def __init__(self, told: str, limit: str, param: str):
        option = f"--{limit.replace('_', '-')}"
        super().__init__(
            403,
            f"{told} An operator can raise that (`appliance key limit NAME {option} N`).",
            param=param,
            code="insufficient_permissions",
        )


# What remains of a claim that a job loses. Not `held`: an operator may have held it.
_WITHOUT: dict[str, Any] = {"preemptible": 1, "deadline_s": None}


def taken_over(db: Database, row: JobRow, caller: Principal) -> dict[str, Any]:
    """Changes of a paused job whose key was revoked when the caller resumes it: it becomes a job of the caller's key,
    and loses what that key may not claim. Nothing if its key lives, or an admin resumes it."""
    if caller.is_admin or not keys.is_revoked(db, row.key_id):
        return {}
    key = _key_of(db, caller)
    changes: dict[str, Any] = {"key_id": caller.key_id}
    if row.priority > key.max_priority:
        changes["priority"] = key.max_priority
    unfinished = jobs.list_unfinished_of(db, key.id)
    for limit, param, _, is_one in _COUNTED:
        if param in _WITHOUT and is_one(row) and sum(is_one(job) for job in unfinished) >= getattr(key, limit):
            changes[param] = _WITHOUT[param]
    return changes


def _key_of(db: Database, caller: Principal) -> KeyRow:
    return (keys.find(db, caller.key_id) if caller.key_id else None) or _DEFAULTS


def check(db: Database, request: JobCreate, caller: Principal) -> None:
    """Raises ClaimRefused."""
    if caller.is_admin:
        return
    key = _key_of(db, caller)
    if request.priority > key.max_priority:
        raise ClaimRefused(
            f"priority is {request.priority}; jobs of this API key have at most {key.max_priority}.",
            "max_priority",
            "priority",
        )
    claims = [row for row in _COUNTED if row[3](request)]
    unfinished = jobs.list_unfinished_of(db, key.id) if claims else []
    for limit, param, called, is_one in claims:
        has, most = sum(is_one(job) for job in unfinished), getattr(key, limit)
        if has >= most:
            raise ClaimRefused(f"{has} unfinished jobs of this API key are {called}; it may have {most}.", limit, param)
