"""/v1/fine_tuning/jobs (https://platform.openai.com/docs/api-reference/fine-tuning).

The API writes the wanted state and wakes the scheduler; it never waits for devices to move.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import energy_views
from appliance.controller.files import storage
from appliance.controller.http import idempotency, views
from appliance.controller.http.paging import After, WholeLimit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import InvalidValue, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.jobs import requests
from appliance.controller.jobs.requests import JobCreate
from appliance.controller.jobs.validation import VALIDATIONS, lines_of
from appliance.controller.jobs.wanted import ask, known_job
from appliance.controller.openai.new_job import check_judges, insert_job
from appliance.store.objects import job_records, jobs
from appliance.store.rows import JobJudgeRow, JobRow
from train.graders.hosts import GraderHosts
from train.methods.methods import METHODS

ROUTE = "fine_tuning.jobs"
# A job whose data is refused ends there: its last events are the lines, at most as many as a report lists, and its end.
_ERROR_EVENTS = 200
_JUDGED = frozenset(name for name, method in METHODS.items() if method.judged_by)


def routes(context: ControllerContext, hosts: GraderHosts) -> APIRouter:
    router = make_router("/v1/fine_tuning/jobs", FINE_TUNING)
    db, organization = context.db, context.config.organization

    def shown_as(row: JobRow, caller: Principal, found: JobJudgeRow | None) -> dict[str, Any]:
        return views.job_object(row, organization, caller, found)

    def shown_job(row: JobRow, caller: Principal) -> dict[str, Any]:
        return shown_as(row, caller, job_records.find_judge(db, row.id) if row.method in _JUDGED else None)

    @router.post("")
    async def create(body: JobCreate, request: Request, caller: Caller) -> dict[str, Any]:
        attempt = idempotency.Attempt.of(request, caller, ROUTE, body.model_dump(mode="json"))
        known_before = partial(jobs.find, db)
        if (row := idempotency.earlier(db, context.config, attempt, known_before)) is not None:
            return shown_job(row, caller)
        await check_judges(context, hosts, body, caller)

        def make() -> JobRow:
            row = insert_job(context, body, caller)
            context.tasks.start(VALIDATIONS, row.id, row.key_id)
            return row

        row, _ = idempotency.once(db, context.config, attempt, known_before, make)
        return shown_job(row, caller)

    @router.get("")
    def list_jobs(request: Request, caller: Caller, after: After = None, limit: WholeLimit = 20) -> dict[str, Any]:
        metadata, null_metadata = _metadata_filter(request)
        page = jobs.page(
            db, viewer=caller.viewer, after=after, limit=limit, metadata=metadata, null_metadata=null_metadata
        )
        page, judges = job_records.page_with_judges(db, page, _JUDGED)
        return list_object(page, lambda row: shown_as(row, caller, judges.get(row.id)))

    @router.get("/{job_id}")
    def retrieve(job_id: str, caller: Caller) -> dict[str, Any]:
        row = known_job(context, job_id, caller)
        return shown_job(row, caller) | {"energy": energy_views.of_job(db, row, time.time())}

    @router.post("/{job_id}/cancel")
    async def cancel(job_id: str, caller: Caller) -> dict[str, Any]:
        return shown_job(ask(context, job_id, "cancel", caller), caller)

    @router.post("/{job_id}/pause")
    async def pause(job_id: str, caller: Caller) -> dict[str, Any]:
        return shown_job(ask(context, job_id, "pause", caller), caller)

    @router.post("/{job_id}/resume")
    async def resume(job_id: str, caller: Caller) -> dict[str, Any]:
        return shown_job(ask(context, job_id, "run", caller), caller)

    @router.get("/{job_id}/events")
    def events(job_id: str, caller: Caller, after: After = None, limit: WholeLimit = 20) -> dict[str, Any]:
        known_job(context, job_id, caller)
        return list_object(job_records.page_events(db, job_id, after=after, limit=limit), views.event_object)

    @router.get("/{job_id}/errors")
    def errors(job_id: str, caller: Caller) -> dict[str, Any]:
        """What was wrong with the job's data, by line; none if it was not that."""
        known_job(context, job_id, caller)
        events = job_records.page_events(db, job_id, after=None, limit=_ERROR_EVENTS).data
        return storage.errors_object(*lines_of(reversed(events)))

    @router.get("/{job_id}/checkpoints")
    def checkpoints(job_id: str, caller: Caller, after: After = None, limit: WholeLimit = 10) -> dict[str, Any]:
        known_job(context, job_id, caller)
        page = job_records.page_checkpoints(db, job_id, after=after, limit=limit)
        return list_object(page, views.checkpoint_object)

    return router


def _metadata_filter(request: Request) -> tuple[dict[str, str], bool]:
    """`metadata[key]=value` pairs, or `metadata=null` for jobs without metadata; never both. Raises BadRequest."""
    pairs: dict[str, str] = {}
    null = False
    for name, value in request.query_params.multi_items():
        if name == "metadata":
            if value != "null":
                raise InvalidValue(
                    f"metadata={shown(value)}: expected metadata[key]=value, or metadata=null.", "metadata"
                )
            null = True
        elif name.startswith("metadata[") and name.endswith("]"):
            pairs[name[len("metadata[") : -1]] = value
    if pairs and null:
        raise InvalidValue("metadata=null and metadata[key]=value exclude each other.", "metadata")
    requests.check_metadata(pairs)
    return pairs, null
