"""Says why a paused job waits: on request, because its key was revoked, or may not use its model any more."""

from __future__ import annotations

from appliance.controller.access.model_access import may_use
from appliance.controller.context.context import ControllerContext
from appliance.controller.jobs.events import add_message
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import keys
from appliance.store.rows import JobRow

KEY_REVOKED = (
    "Its API key was revoked or has expired; its owner with another key, or an operator, can resume it "
    "(`appliance job resume`)."
)
MODEL_WITHDRAWN = (
    "Its API key may not use the model that it trains any more: the sharing has ended, or the key's list of models was "
    "cut. Once it may again, its owner or an operator can resume it (`appliance job resume`)."
)


def reason(db: Database, row: JobRow) -> str | None:
    """The reason to show in place of the planner's; None: show the planner's."""
    if row.wanted != "pause":
        return None
    if keys.is_revoked(db, row.key_id):
        return KEY_REVOKED
    return None if may_use(db, row.key_id, row.model) else MODEL_WITHDRAWN


def pause_jobs_of(context: ControllerContext, key_id: str) -> list[str]:
    """Pause the jobs of a revoked key; returns their ids. They are not cancelled, because the owner with another key,
    or a successor, may want the results so far."""
    return _pause(context, jobs.list_unfinished_of(context.db, key_id), KEY_REVOKED)


def pause_jobs_without_model(context: ControllerContext) -> list[str]:
    """Pause the jobs whose keys may not use the models that they train any more; returns their ids. Call it in every
    transaction that takes access to a model away: one that waits would fail at its start, and one that runs would go on
    learning from what its owner may not see."""
    db = context.db
    lost = [row for row in jobs.list_unfinished(db) if not may_use(db, row.key_id, row.model)]
    return _pause(context, lost, MODEL_WITHDRAWN)


def _pause(context: ControllerContext, rows: list[JobRow], why: str) -> list[str]:
    """Running ones stop at their next step, as after any pause."""
    paused = [row.id for row in rows if row.wanted == "run"]
    for job_id in paused:
        jobs.set_wanted(context.db, job_id, "pause")
        jobs.update(context.db, job_id, reason=why)
        add_message(context.db, job_id, f"Fine-tuning job paused: {why}", level="warn")
    return paused
