"""/admin/v1/operations, and the routes that begin one: import a model, verify.

Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence `{name:path}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import StringConstraints

from appliance.controller.access.model_access import stored_model
from appliance.controller.access.naming import MODEL_NAME_RULE, is_model_name, made_by_jobs
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.idempotency import Attempt
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import (
    BadRequest,
    Conflict,
    InvalidValue,
    NotFound,
    OperationFailed,
    shown,
)
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.models import operations
from appliance.controller.models.imported import adapter_base
from appliance.store.database import Database, Part
from appliance.store.objects import models
from appliance.store.records import operations as operation_rows
from appliance.store.rows import OperationRow

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Import(StrictBody):
    source: Text
    origin: Text | None = None  # where a path's files came from, kept as the model's source
    name: Text | None = None
    base: Text | None = None
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,255}$")] | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router."""
    db = context.db

    @router.post("/models/import", status_code=202)
    async def import_model(body: Import, request: Request, caller: Caller) -> JSONResponse:
        told = {"source": body.source, "revision": body.revision}

        async def given() -> dict[str, Any]:
            for field, text in (("source", body.source), ("origin", body.origin or "")):
                if not text.isprintable():
                    raise InvalidValue(f"The {field} contains control characters.", field)
            if body.name is not None:
                _check_new_name(db, body.name)
            context.quotas.disk.check()  # only the import itself finds out how much more it needs
            return {**told, "name": body.name, "origin": body.origin, "adapter": await _adapter(context, body)}

        sent, target = body.model_dump(mode="json"), body.name or body.source
        return await _begin(context, request, caller, "model.import", target, sent, given, told)

    @router.post("/models/{name:path}/verify", status_code=202)
    async def verify(name: str, request: Request, caller: Caller) -> JSONResponse:
        row = stored_model(db, name)
        return await _begin(context, request, caller, "model.verify", row.id, row.id)

    @router.post("/tiers/verify", status_code=202)
    async def verify_tiers(request: Request, caller: Caller) -> JSONResponse:
        return await _begin(context, request, caller, "tiers.verify", operations.TIERS, "")

    @router.get("/operations")
    def list_operations(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        return list_object(operation_rows.page(db, **part), operations.view)

    @router.get("/operations/{operation_id}")
    def operation(operation_id: str) -> dict[str, Any]:
        row = operation_rows.find(db, operation_id)
        if row is None:
            raise NotFound(f"No operation {shown(operation_id)}.", param="id", code="operation_not_found")
        return {"operation": operations.view(row)}


async def _nothing() -> dict[str, Any]:
    return {}


async def _begin(
    context: ControllerContext,
    request: Request,
    caller: Principal,
    action: str,
    target: str,
    body: Any,
    given: Callable[[], Awaitable[dict[str, Any]]] = _nothing,
    told: Mapping[str, Any] = MappingProxyType({}),
) -> JSONResponse:
    """Starts an operation, or answers with the one that an earlier attempt of the request began. One that failed is no
    answer to a mere retry: it may be that of an earlier request.

    Args:
        action: "noun.kind" of the audit row; the kind is the operation's.
        body: of the request, as JSON.
        given: checks a new request and returns what the operation begins with. Raises ApiError.
        told: for the audit log.
    """
    kind = action.partition(".")[2]

    def begun(operation_id: str) -> OperationRow | None:
        row = operation_rows.find(context.db, operation_id)
        is_failed = row is not None and row.state == "failed"
        return None if is_failed and "idempotency-key" not in request.headers else row

    attempt = Attempt(request, caller, f"operations.{action}", body, begun)
    if (earlier := attempt.earlier()) is not None:
        record(context, caller, action, earlier.target, repeated=True)
        return _accepted(earlier)
    begins_with = await given()

    def make() -> OperationRow:
        for twin in operation_rows.list_all(context.db, "state = 'running' AND kind = ? AND target = ?", kind, target):
            raise Conflict(
                f"{kind} of {shown(target)} is already running as operation {twin.id}.",
                param=None,
                code="operation_running",
            )
        return operations.start(context, kind, target, caller.key_id, **begins_with)

    row, new = attempt.once(make)
    if new:
        record(context, caller, action, target, **told)
    return _accepted(row)


def _accepted(row: OperationRow) -> JSONResponse:
    return JSONResponse({"operation": operations.view(row)}, 202)


def _check_new_name(db: Database, name: str) -> None:
    if not is_model_name(name):
        raise InvalidValue(f"Invalid model name {shown(name)}: expected {MODEL_NAME_RULE}.", "name")
    if name.startswith("ft:"):
        raise InvalidValue("Names that begin with 'ft:' belong to fine-tuned models.", "name")
    if models.find(db, name) is not None or made_by_jobs(db, name):
        raise Conflict(
            f"The model {shown(name)} exists, or a job makes it; delete it first or choose another name.",
            param="name",
            code="model_exists",
        )


async def _adapter(context: ControllerContext, body: Import) -> dict[str, Any] | None:
    """The adapter that is to be imported, and its base; None for a whole model. Raises BadRequest, Conflict."""
    try:
        found = await context.model_ops.find_adapter(body.source, name=body.name, revision=body.revision)
    except OperationFailed as error:
        raise BadRequest(str(error), param="source", code=error.code) from error
    if found is not None:
        return {"found": found, "base": adapter_base(context, found, body.base)}
    if body.base is not None:
        raise InvalidValue(
            f"A base belongs to an adapter (adapter_config.json), and {shown(body.source)} is not one.", "base"
        )
    return None
