"""/admin/v1/queue, and an operator's changes to jobs: order and bounds."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from appliance.controller.access.model_access import resolve
from appliance.controller.context.context import ControllerContext, name_of
from appliance.controller.http.routers import Status, StrictBody, audited
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs import settings
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.phases import JOBS, pause_reason
from appliance.controller.models.capacity import Estimator
from appliance.controller.openai.job_routes import job_object, job_phase
from appliance.controller.openai.new_job import Devices, Moment, Priority
from appliance.store.objects import jobs
from appliance.store.rows import JobRow
from train.methods.methods import method_of

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


def routes(context: ControllerContext, router: APIRouter) -> None:
    db = context.db

    @router.get("/queue")
    def show_queue(now: Status) -> dict[str, Any]:
        """Every unfinished job in the order in which the planner serves them, and what each owner has."""
        planned = {one["id"]: one for one in now["queue"]}
        rows = [row for row in jobs.list_unfinished(db) if row.wanted != "cancel"]
        rows.sort(key=lambda row: (0, planned[row.id]["position"]) if row.id in planned else (1, row.created_s))
        data = [
            _entry(job_object(row, context.config.organization), place, planned.get(row.id), pause_reason(db, row))
            for place, row in enumerate(rows, 1)
        ]
        return {"object": "list", "data": data, "owners": _owners(data)}

    @router.patch("/jobs/{job_id}")
    @audited("job.update")
    async def update(job_id: str, body: JobUpdate, caller: Caller) -> dict[str, Any]:
        row, fields = JOBS.known(db, job_id, caller), body.model_dump(exclude_unset=True)
        if row.finished or row.wanted == "cancel":
            message = f"The fine-tuning job {job_id} is {job_phase(row)}; it cannot be changed any more."
            raise Conflict(message, "fine_tune_id", "invalid_job_state")
        text = ", ".join(f"{name} {'none' if value is None else value}" for name, value in fields.items())
        with db.transaction():
            jobs.update(db, row.id, **_changes(context, row, fields))
            add_message(db, row.id, f"Changed by an operator: {text}.")
        context.scheduler.nudge(f"update of {row.id}", name_of(context, caller))
        return job_object(jobs.get(db, row.id), context.config.organization)


def _changes(context: ControllerContext, row: JobRow, fields: dict[str, Any]) -> dict[str, Any]:
    """The columns to write. Raises BadRequest."""
    if not fields:
        raise BadRequest("The request changes nothing: give at least one field.", code="missing_required_parameter")
    for name in ("priority", "preemptible"):
        if fields.get(name, 0) is None:
            raise InvalidValue(f"{name} cannot be null.", name)
    changes = fields | ({"preemptible": int(fields["preemptible"])} if "preemptible" in fields else {})
    if not fields.keys().isdisjoint(("min_devices", "max_devices")):
        least, most = (fields.get(name, getattr(row, name)) for name in ("min_devices", "max_devices"))
        sizes = settings.DeviceBounds(least, most).check(row.resolved, settings.nodes_of(context))
        changes |= {"allowed_sizes": sizes} if row.resolved else {}
        if row.resolved and (base := resolve(context.db, row.model)) is not None:
            estimator = Estimator(settings.shape_of(base), settings.box_facts(context), method_of(row.method))
            changes["estimate"] = (row.estimate or {}) | {"memory": estimator.verdict(row.resolved, sizes).memory()}
    return changes


def _entry(job: dict[str, Any], position: int, planned: dict[str, Any] | None, paused: str | None) -> dict[str, Any]:
    """job: as the API shows it."""
    if planned is not None:
        reason, message = planned["reason"], paused or planned["message"]
    else:
        reason, message = VALIDATING if job["phase"] == "validating" else SUBMITTED
    names = "id owner phase priority devices min_devices max_devices allowed_sizes deadline_s preemptible created_s"
    return {"position": position, **{name: job[name] for name in names.split()}, "reason": reason, "message": message}


def _owners(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each owner has: among equal priorities, everyone's first job comes before anyone's second."""
    found: dict[str | None, dict[str, Any]] = {}
    for entry in entries:
        shares = found.setdefault(entry["owner"], {"owner": entry["owner"], "running": 0, "waiting": 0, "devices": 0})
        shares["running" if entry["devices"] else "waiting"] += 1
        shares["devices"] += len(entry["devices"])
    return list(found.values())
