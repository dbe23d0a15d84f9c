"""/admin/v1/jobs/{id}/profile: where the time of a running job goes, measured over its next steps."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import Conflict, OperationFailed
from appliance.controller.interfaces.principal import Caller
from appliance.controller.jobs.wanted import JOBS
from runtime.profile_shares import MOST_STEPS


class ProfileRequest(StrictBody):
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""

    @router.post("/jobs/{job_id}/profile")
    async def profile(job_id: str, body: ProfileRequest, caller: Caller) -> dict[str, Any]:
        """An event of the job with `data.profile` has what came of it, once the steps are done."""
        row = JOBS.known(context.db, job_id, caller)
        try:
            await context.scheduler.profile_job(row.id, body.steps)
        except OperationFailed as error:
            raise Conflict(
                f"The fine-tuning job {row.id} cannot be profiled: {error}", param="fine_tune_id", code=error.code
            ) from error
        record(context, caller, "job.profile", row.id, steps=body.steps)
        return {"id": row.id, "steps": body.steps}
