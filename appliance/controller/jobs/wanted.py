"""Records what users want of a job (cancel, pause, resume) and wakes the scheduler, which carries it out."""

from __future__ import annotations

from appliance.controller.access.model_access import base_of, caller_may_use, unknown_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.resource import Resource
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Principal
from appliance.controller.jobs import claims
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.validation import VALIDATIONS
from appliance.store.errors import IllegalTransition
from appliance.store.objects import jobs
from appliance.store.rows import JobRow, JobWanted

_SAID = {
    "cancel": "Fine-tuning job cancelled by request.",
    "pause": "Fine-tuning job paused by request; its status stays 'queued' until it is resumed.",
    "run": "Fine-tuning job resumed by request.",
}


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


def _taken_over(context: ControllerContext, row: JobRow, caller: Principal) -> JobRow:
    """The job as the caller resumes it, with the caller's key and claims. Raises NotFound once the caller's or the
    job's key may not use the model that the job trains."""
    db, changes = context.db, claims.taken_over(context.db, row, caller)
    if changes:
        jobs.update(db, row.id, **changes)
        row = jobs.get(db, row.id)
    if lost := sorted(changes.keys() - {"key_id"}):
        text = f"It was resumed with an API key that may claim less; changed: {', '.join(lost)}."
        add_message(db, row.id, text, level="warn")
    if not caller_may_use(context.db, caller, row.model) or base_of(context.db, row) is None:
        raise unknown_model(row.model)
    return row


def ask(context: ControllerContext, job_id: str, wanted: JobWanted, caller: Principal) -> JobRow:
    """Raises NotFound and Conflict."""
    db = context.db
    row = JOBS.known(db, job_id, caller)
    verb = "resume" if wanted == "run" else wanted
    try:
        with db.transaction():
            if wanted == "run" and row.wanted == "pause" and not row.finished:
                row = _taken_over(context, row, caller)
            after = jobs.set_wanted(db, job_id, wanted)
            # A job without devices ends at once; a running one when the scheduler has stopped its ranks.
            if wanted == "cancel" and not row.finished and row.phase != "running":
                jobs.set_phase(db, job_id, "cancelled", reason="cancelled by request")
            if after.wanted != row.wanted:
                add_message(db, job_id, _SAID[wanted])
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
