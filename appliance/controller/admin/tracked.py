"""/admin/v1/jobs/{id}/tracked: an experiment tracker has a run of a job, or takes none; its owner hears of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import StringConstraints

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs.events import add_message
from appliance.controller.jobs.wanted import JOBS


class Tracked(StrictBody):
    """address: an address in a browser, or where the run's files are. refused: in its place, why there is no run."""

    tracker: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    address: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    refused: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the route to the admin router."""

    @router.post("/jobs/{job_id}/tracked")
    async def tracked(job_id: str, body: Tracked, caller: Caller) -> dict[str, Any]:
        """The box's exporter of experiment trackers says so (`appliance.tracking`)."""
        row, detail = JOBS.known(context.db, job_id, caller), body.model_dump(exclude_none=True)
        if (body.address is None) == (body.refused is None):
            raise InvalidValue("Give either 'address' or 'refused'.", "address")
        with context.db.transaction():
            if body.refused is None:
                add_message(context.db, row.id, f"{body.tracker} has a run of this job: {body.address}", data=detail)
            else:
                text = f"{body.tracker} takes no run of this job and is not asked again: {body.refused}"
                add_message(context.db, row.id, text, level="warn", data=detail)
            record(context, caller, "job.tracked", row.id, **detail)
        return {"id": row.id, **detail}
