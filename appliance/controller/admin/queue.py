"""/admin/v1/queue, and an operator's changes to jobs: order, bounds, hold and release."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from appliance.controller.context.audit import name_of, record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.reading import Status
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.http.views import job_object, job_phase
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, OperationFailed
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.requests import Devices, Moment, Priority
from appliance.controller.jobs.settings import Wish, nodes_of
from appliance.controller.jobs.wanted import JOBS, pause_reason
from appliance.store.objects import jobs
from appliance.store.rows import JobRow, columns
from runtime.profile_shares import MOST_STEPS

# Slurm's reason codes (https://slurm.schedmd.com/job_reason_codes.html), each with a sentence of the box's own.
VALIDATING = ("Dependency", "Its training file is being checked.")
SUBMITTED = ("Priority", "The scheduler has not looked at it yet.")


class JobUpdate(StrictBody):
    """Only the given fields change; null removes a bound or the deadline."""

    priority: Priority | None = None
    deadline_s: Moment | None = None
    preemptible: bool | None = None
    min_devices: Devices | None = None
    max_devices: Devices | None = None


class ProfileRequest(StrictBody):
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.get("/queue")
    def show_queue(now: Status) -> dict[str, Any]:
        """Every unfinished job in the order in which the planner serves them, and what each owner has."""
        planned = {one["id"]: one for one in now["queue"]}
        rows = [row for row in jobs.list_unfinished(db) if row.wanted != "cancel"]
        rows.sort(key=lambda row: (0, planned[row.id]["position"]) if row.id in planned else (1, row.created_s))
        data = [_entry(row, place, planned.get(row.id), pause_reason(db, row)) for place, row in enumerate(rows, 1)]
        return {"object": "list", "data": data, "owners": _owners(data)}

    @router.patch("/jobs/{job_id}")
    async def update(job_id: str, body: JobUpdate, caller: Caller) -> dict[str, Any]:
        row = _unfinished(context, caller, job_id)
        changes = _changes(context, row, body)
        with db.transaction():
            jobs.update(db, job_id, **changes)
            changed = body.model_dump(exclude_unset=True)
            text = ", ".join(f"{name} {'none' if value is None else value}" for name, value in changed.items())
            add_message(db, job_id, f"Changed by an operator: {text}.")
            record(context, caller, "job.update", job_id, **changed)
        context.scheduler.nudge(f"update of {job_id}", name_of(context, caller))
        return job_object(jobs.get(db, job_id), context.config.organization)

    @router.post("/jobs/{job_id}/hold")
    async def hold(job_id: str, caller: Caller) -> dict[str, Any]:
        """It keeps its state and waits. Idempotent."""
        text = f"Held by an operator; it keeps its state and waits. `appliance job release {job_id}` starts it."
        return _set_held(context, caller, job_id, True, "hold", text)

    @router.post("/jobs/{job_id}/release")
    async def release(job_id: str, caller: Caller) -> dict[str, Any]:
        return _set_held(context, caller, job_id, False, "release", "Released by an operator.")

    @router.post("/jobs/{job_id}/profile")
    async def profile(job_id: str, body: ProfileRequest, caller: Caller) -> dict[str, Any]:
        """Measure where the time of the next steps goes; an event of the job with `data.profile` says it."""
        row = JOBS.known(db, job_id, caller)
        try:
            await context.scheduler.profile_job(row.id, body.steps)
        except OperationFailed as error:
            raise Conflict(
                f"The fine-tuning job {row.id} cannot be profiled: {error}", param="fine_tune_id", code=error.code
            ) from error
        record(context, caller, "job.profile", row.id, steps=body.steps)
        return {"id": row.id, "steps": body.steps}


def _set_held(
    context: ControllerContext, caller: Principal, job_id: str, held: bool, verb: str, text: str
) -> dict[str, Any]:
    """Raises NotFound and Conflict."""
    row = _unfinished(context, caller, job_id)
    with context.db.transaction():
        if bool(row.held) != held:
            jobs.update(context.db, job_id, held=int(held))
            add_message(context.db, job_id, text)
        record(context, caller, f"job.{verb}", job_id)
    context.scheduler.nudge(f"{verb} of {job_id}", name_of(context, caller))
    return job_object(jobs.get(context.db, job_id), context.config.organization)


def _unfinished(context: ControllerContext, caller: Principal, job_id: str) -> JobRow:
    row = JOBS.known(context.db, job_id, caller)
    if row.finished or row.wanted == "cancel":
        raise Conflict(
            f"The fine-tuning job {job_id} is {job_phase(row)}; it cannot be changed, held or released any more.",
            param="fine_tune_id",
            code="invalid_job_state",
        )
    return row


def _changes(context: ControllerContext, row: JobRow, body: JobUpdate) -> dict[str, Any]:
    """The columns to write. Raises BadRequest."""
    given = body.model_fields_set
    if not given:
        raise BadRequest("The request changes nothing: give at least one field.", code="missing_required_parameter")
    changes = body.model_dump(exclude_unset=True)
    for name in ("priority", "preemptible"):
        if name in changes and changes[name] is None:
            raise InvalidValue(f"{name} cannot be null.", name)
    if "preemptible" in given:
        changes["preemptible"] = int(changes["preemptible"])
    if not given.isdisjoint(("min_devices", "max_devices")):
        wish = Wish(*(changes.get(name, getattr(row, name)) for name in ("min_devices", "max_devices")))
        sizes = wish.check(row.resolved, nodes_of(context))
        changes |= {"allowed_sizes": sizes} if row.resolved else {}
    return changes


def _entry(row: JobRow, position: int, planned: dict[str, Any] | None, paused: str | None) -> dict[str, Any]:
    if planned is not None:
        reason, message = planned["reason"], paused or planned["message"]
    else:
        reason, message = VALIDATING if row.phase == "validating" else SUBMITTED
    return {
        "position": position,
        **columns(row, "id priority devices min_devices max_devices allowed_sizes deadline_s created_s"),
        "owner": row.owner or None,
        "phase": job_phase(row),
        "preemptible": bool(row.preemptible),
        "held": bool(row.held),
        "reason": reason,
        "message": message,
    }


def _owners(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each owner has: among equal priorities, everyone's first job comes before anyone's second."""
    found: dict[str | None, dict[str, Any]] = {}
    for entry in entries:
        shares = found.setdefault(entry["owner"], {"owner": entry["owner"], "running": 0, "waiting": 0, "devices": 0})
        shares["running" if entry["devices"] else "waiting"] += 1
        shares["devices"] += len(entry["devices"])
    return list(found.values())
