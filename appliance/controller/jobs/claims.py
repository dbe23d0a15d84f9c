"""Limits the priority a job may claim over others, by the key that creates it; admins have no limit."""

from __future__ import annotations

from collections.abc import Callable

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
# By the limit on their number: the field, the description of such a job, and the test for it.
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


def check(db: Database, request: JobCreate, caller: Principal) -> None:
    """Raises ClaimRefused."""
    if caller.is_admin:
        return
    key = (keys.find(db, caller.key_id) if caller.key_id else None) or _DEFAULTS
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
