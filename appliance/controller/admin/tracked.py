"""/admin/v1/jobs/{id}/tracked: an experiment tracker has begun the run of a job; its owner hears where."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import StringConstraints

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.wanted import known_job


class Tracked(StrictBody):
    """address: an address in a browser, or where the run's files are."""

    tracker: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    address: Annotated[str, StringConstraints(min_length=1, max_length=4096)]


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/jobs/{job_id}/tracked")
    async def tracked(job_id: str, body: Tracked, caller: Caller) -> dict[str, Any]:
        """The box's exporter of experiment trackers says so (`appliance.tracking`)."""
        row = known_job(context, job_id, caller)
        with context.db.transaction():
            text = f"{body.tracker} has a run of this job: {body.address}"
            add_message(context.db, row.id, text, data=body.model_dump())
            record(context, caller, "job.tracked", row.id, **body.model_dump())
        return {"id": row.id, **body.model_dump()}
