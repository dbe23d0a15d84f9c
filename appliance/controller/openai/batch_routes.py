"""/v1/batches: create, retrieve, list, cancel (https://platform.openai.com/docs/api-reference/batch)."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from appliance.controller.batches.input_lines import ENDPOINTS
from appliance.controller.batches.work import BATCHES, Batches
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage as files
from appliance.controller.http import idempotency, views
from appliance.controller.http.paging import After, Limit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import INFERENCE, Caller, Principal
from appliance.controller.jobs.requests import check_metadata
from appliance.store.ids import new_id
from appliance.store.objects import batches
from appliance.store.rows import BatchRow, columns

ROUTE = "batches"
WINDOW_S = 24 * 3600.0
_MOMENTS = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class OutputExpiresAfter(StrictBody):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=files.EXPIRY_S.start, lt=files.EXPIRY_S.stop)]


class BatchCreate(StrictBody):
    completion_window: Literal["24h"]
    endpoint: Annotated[str, StringConstraints(max_length=128)]
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


def routes(context: ControllerContext, runner: Batches) -> APIRouter:
    router = make_router("/v1/batches", INFERENCE)
    db = context.db

    @router.post("")
    async def create(body: BatchCreate, request: Request, caller: Caller) -> dict[str, Any]:
        if body.endpoint not in ENDPOINTS:
            raise InvalidValue(
                f"Invalid value for 'endpoint': {shown(body.endpoint)} was given, expected one of "
                f"{', '.join(ENDPOINTS)}.",
                "endpoint",
            )
        check_metadata(body.metadata)
        attempt = idempotency.Attempt.of(request, caller, ROUTE, body.model_dump())
        known_before = partial(batches.find, db, viewer=caller.viewer)
        if (earlier := idempotency.earlier(db, context.config, attempt, known_before)) is not None:
            return _view(earlier, runner.progress(earlier), caller)
        file = files.known_file(context, body.input_file_id, caller, "input_file_id")
        if file.purpose != "batch":
            raise BadRequest(
                f"The file {file.id} has the purpose {file.purpose!r}; a batch reads one of purpose 'batch'.",
                param="input_file_id",
                code="invalid_file_purpose",
            )

        def make() -> BatchRow:
            context.quotas.check_batch(caller, file.bytes)
            now_s = time.time()
            row = BatchRow(
                id=new_id("batch_"),
                endpoint=body.endpoint,
                input_file_id=file.id,
                created_s=now_s,
                expires_s=now_s + WINDOW_S,
                key_id=caller.key_id,
                owner=caller.owner,
                metadata=body.metadata,
                output_keep_s=body.output_expires_after.seconds if body.output_expires_after else None,
            )
            batches.insert(db, row)
            context.tasks.start(BATCHES, row.id, row.key_id)
            return row

        row, _ = idempotency.once(db, context.config, attempt, known_before, make)
        return _view(row, runner.progress(row), caller)

    @router.get("")
    def list_batches(caller: Caller, after: After = None, limit: Limit = 20) -> dict[str, Any]:
        page = batches.page(db, viewer=caller.viewer, after=after, limit=limit)
        return list_object(page, lambda row: _view(row, runner.progress(row), caller))

    @router.get("/{batch_id}")
    def retrieve(batch_id: str, caller: Caller) -> dict[str, Any]:
        row = _known(context, batch_id, caller)
        return _view(row, runner.progress(row), caller)

    @router.post("/{batch_id}/cancel")
    async def cancel(batch_id: str, caller: Caller) -> dict[str, Any]:
        row = _known(context, batch_id, caller)
        if row.status in ("validating", "in_progress"):
            batches.update(db, row.id, status="cancelling", cancelling_s=time.time())
            context.tasks.changed(BATCHES, row.id)
        elif row.status not in ("cancelling", "cancelled"):
            raise Conflict(
                f"Cannot cancel a batch with status '{row.status}'.", param="batch_id", code="batch_not_cancellable"
            )
        return _view(row := _known(context, batch_id, caller), runner.progress(row), caller)

    return router


def _known(context: ControllerContext, batch_id: str, caller: Principal) -> BatchRow:
    row = batches.find(context.db, batch_id, viewer=caller.viewer)
    if row is None:
        raise NotFound(f"No batch found with id {shown(batch_id)}.", param="batch_id", code="batch_not_found")
    return row


def _view(row: BatchRow, going: tuple[int, int, str | None], caller: Principal) -> dict[str, Any]:
    """OpenAI's object, and `waiting_for`: why an unfinished batch makes no progress now, None if it does."""
    completed, failed, waiting_for = going
    moments = {name: getattr(row, f"{name}_s") for name in _MOMENTS}
    return {
        "id": row.id,
        "object": "batch",
        **columns(row, "endpoint model input_file_id status output_file_id error_file_id usage metadata"),
        "errors": None if row.errors is None else {"object": "list", "data": row.errors},
        "completion_window": "24h",
        "created_at": int(row.created_s),
        **{f"{name}_at": None if at_s is None else int(at_s) for name, at_s in moments.items()},
        "request_counts": {"total": row.total, "completed": completed, "failed": failed},
        "waiting_for": waiting_for,
    } | views.whose(row, caller)
