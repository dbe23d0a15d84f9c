"""/v1/batches: create, retrieve, list, cancel (https://platform.openai.com/docs/api-reference/batch)."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import StringConstraints

from appliance.controller.access.quotas import ANSWERS_PER_INPUT
from appliance.controller.batches.input_lines import ENDPOINTS
from appliance.controller.batches.work import BATCHES as KIND
from appliance.controller.batches.work import waiting_for
from appliance.controller.context.context import ControllerContext
from appliance.controller.files.storage import FILES, ExpiresAfter
from appliance.controller.http.paging import part
from appliance.controller.http.resource import Resource
from appliance.controller.http.strict_body import Metadata, StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict
from appliance.controller.interfaces.principal import INFERENCE, Caller
from appliance.store.ids import new_id
from appliance.store.objects import batches
from appliance.store.rows import BatchRow, columns

WINDOW_S = 24 * 3600.0
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCHES = Resource("batch", "/v1/batches", (INFERENCE,), batches.find, fields=("endpoint", "input_file_id", "status"))


class BatchCreate(StrictBody):
    completion_window: Literal["24h"]
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def routes(context: ControllerContext) -> APIRouter:
    db, view = context.db, partial(_view, context)
    router = BATCHES.serve(context, view, batches.page, part(20, most=100))

    @router.post("")
    async def create(body: BatchCreate, request: Request, caller: Caller) -> dict[str, Any]:
        attempt = BATCHES.attempt(request, caller, body.model_dump())
        if (earlier := attempt.earlier()) is not None:
            return view(earlier)
        file = FILES.known(db, body.input_file_id, caller, "input_file_id")
        if file.purpose != "batch":
            raise BadRequest(
                f"The file {file.id} has the purpose {file.purpose!r}; a batch reads one of purpose 'batch'.",
                param="input_file_id",
                code="invalid_file_purpose",
            )

        def make() -> BatchRow:
            context.quotas.check(caller, ANSWERS_PER_INPUT * file.bytes, begins=True)
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
            context.tasks.start(KIND, row.id, row.key_id)
            return row

        return view(attempt.once(make))

    @router.post("/{batch_id}/cancel")
    async def cancel(batch_id: str, caller: Caller) -> dict[str, Any]:
        row = BATCHES.known(db, batch_id, caller)
        if row.status in ("validating", "in_progress"):
            batches.set_status(db, row.id, "cancelling")
            context.tasks.restart(KIND, row.id)
        elif row.status not in ("cancelling", "cancelled"):
            raise Conflict(
                f"Cannot cancel a batch with status '{row.status}'.", param="batch_id", code="batch_not_cancellable"
            )
        return view(BATCHES.known(db, batch_id, caller))

    return router


def _view(context: ControllerContext, row: BatchRow) -> dict[str, Any]:
    """OpenAI's object, and `waiting_for`: why an unfinished batch makes no progress now, None if it does."""
    return {
        "id": row.id,
        "object": "batch",
        **columns(row, "endpoint model input_file_id status output_file_id error_file_id metadata"),
        "usage": None if row.usage is None else _usage(row.usage),
        "errors": None if row.errors is None else {"object": "list", "data": row.errors},
        "completion_window": "24h",
        "created_at": int(row.created_s),
        "expires_at": int(row.expires_s),
        **{f"{name}_at": int(row.moments[name]) if name in row.moments else None for name in _MOMENTS},
        "request_counts": {"total": row.total, "completed": row.completed, "failed": row.failed},
        "waiting_for": waiting_for(context, row),
        "owner": row.owner or None,
    }


def _usage(tokens: dict[str, int]) -> dict[str, Any]:
    return {
        **{name: tokens.get(name, 0) for name in ("input_tokens", "output_tokens", "total_tokens")},
        "input_tokens_details": {"cached_tokens": tokens.get("cached_tokens", 0)},
        "output_tokens_details": {"reasoning_tokens": tokens.get("reasoning_tokens", 0)},
    }
