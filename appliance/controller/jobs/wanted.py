"""What people want of a job (cancel, pause, resume), recorded for the scheduler, which carries it out; and the pauses
that follow from what the job's key may do."""

from __future__ import annotations

from typing import Any

from appliance.controller.access.model_access import base_of, caller_may_use, may_use, unknown_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.resource import Resource
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Principal
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.validation import VALIDATIONS
from appliance.store.database import Database
from appliance.store.errors import IllegalTransition
from appliance.store.objects import jobs
from appliance.store.records import keys
from appliance.store.rows import JobRow, JobWanted

JOBS = Resource(
    "job",
    "/v1/fine_tuning/jobs",
    (FINE_TUNING,),
    jobs.find_visible,
    missing="Could not find fine tune: {}",
    param="fine_tune_id",
    code="fine_tune_not_found",
    fields=("status", "model", "training_file", "validation_file"),
)
KEY_REVOKED = (
    "Its API key was revoked or has expired; its owner with another key, or an operator, can resume it "
    "(`appliance job resume`)."
)
MODEL_WITHDRAWN = (
    "Its API key may not use the model that it trains any more: the sharing has ended, or the key's list of models was "
    "cut. Once it may again, its owner or an operator can resume it (`appliance job resume`)."
)
_MESSAGES = {
    "cancel": "Fine-tuning job cancelled by request.",
    "pause": "Fine-tuning job paused by request; its status stays 'queued' until it is resumed.",
    "run": "Fine-tuning job resumed by request.",
}


def ask(context: ControllerContext, job_id: str, wanted: JobWanted, caller: Principal) -> JobRow:
    """Raises NotFound and Conflict."""
    db = context.db
    row = JOBS.known(db, job_id, caller)
    verb = "resume" if wanted == "run" else wanted
    try:
        with db.transaction():
            if wanted == "run" and row.wanted == "pause" and not row.finished:
                row = _taken_over(db, row, caller)
            after = jobs.set_wanted(db, job_id, wanted)
            # A job without devices ends at once; a running one when the scheduler has stopped its ranks.
            if wanted == "cancel" and not row.finished and row.phase != "running":
                jobs.set_phase(db, job_id, "cancelled", reason="cancelled by request")
            if after.wanted != row.wanted:
                add_message(db, job_id, _MESSAGES[wanted])
            after = jobs.get(db, job_id)
    except IllegalTransition as error:
        raise Conflict(
            f"The fine-tuning job {job_id} is {error.found}; it cannot be asked to {verb} any more.",
            param="fine_tune_id",
            code="invalid_job_state",
        ) from error
    if wanted == "cancel":
        context.tasks.restart(VALIDATIONS, job_id)  # frees its slot
    context.scheduler.nudge(f"{verb} of {job_id}")
    return after


def max_priority(db: Database, caller: Principal) -> int:
    """The highest priority that the jobs of the caller's key may have; 0 for a caller without a key."""
    key = keys.find(db, caller.key_id) if caller.key_id else None
    return 0 if key is None else key.max_priority


def _taken_over(db: Database, row: JobRow, caller: Principal) -> JobRow:
    """The job as the caller resumes it. One whose key was revoked becomes a job of the caller's key, and loses what
    that key may not claim; not if an admin resumes it. Raises NotFound once the caller's or the job's key may not use
    the model that the job trains."""
    if not caller.is_admin and keys.how_ended(db, row.key_id):
        most = max_priority(db, caller)
        claims: dict[str, Any] = {} if most > 0 else {"preemptible": 1, "deadline_s": None}
        claims["priority"] = min(row.priority, most)
        if lost := sorted(name for name, value in claims.items() if getattr(row, name) != value):
            text = f"It was resumed with an API key that may claim less; changed: {', '.join(lost)}."
            add_message(db, row.id, text, level="warn")
        jobs.update(db, row.id, key_id=caller.key_id, **claims)
        row = jobs.get(db, row.id)
    if not caller_may_use(db, caller, row.model) or base_of(db, row) is None:
        raise unknown_model(row.model)
    return row


def pause_reason(db: Database, row: JobRow) -> str | None:
    """The reason to show in place of the planner's; None: show the planner's."""
    if row.wanted != "pause":
        return None
    if keys.how_ended(db, row.key_id):
        return KEY_REVOKED
    return None if may_use(db, row.key_id, row.model) else MODEL_WITHDRAWN


def pause_jobs_of(db: Database, key_id: str) -> list[str]:
    """Pause the jobs of a revoked key; returns their ids. They are not cancelled, because the owner with another key,
    or a successor, may want the results so far."""
    return _pause(db, [row for row in jobs.list_unfinished(db) if row.key_id == key_id], KEY_REVOKED)


def pause_jobs_without_model(db: Database) -> list[str]:
    """Pause the jobs whose keys may not use the models that they train any more; returns their ids. Call it in every
    transaction that takes access to a model away: one that waits would fail at its start, and one that runs would go on
    learning from what its owner may not see."""
    lost = [row for row in jobs.list_unfinished(db) if not may_use(db, row.key_id, row.model)]
    return _pause(db, lost, MODEL_WITHDRAWN)


def _pause(db: Database, rows: list[JobRow], why: str) -> list[str]:
    """Running ones stop at their next step, as after any pause."""
    paused = [row.id for row in rows if row.wanted == "run"]
    for job_id in paused:
        jobs.set_wanted(db, job_id, "pause")
        jobs.update(db, job_id, reason=why)
        add_message(db, job_id, f"Fine-tuning job paused: {why}", level="warn")
    return paused
