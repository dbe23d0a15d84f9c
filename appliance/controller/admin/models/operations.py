"""/admin/v1/operations: long work on models, and the routes that begin it: import a model, verify.

Each is a task with a row of its own, which has its progress and its result. After a restart it starts over from what is
on disk. Names contain ":" and may contain "/": clients send them percent-encoded in one segment or plain, hence
`{name:path}`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import StringConstraints

from appliance.controller.access.model_access import caller_of, stored_model
from appliance.controller.access.naming import MODEL_NAME_RULE, is_model_name, made_by_jobs
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.http.idempotency import Attempt
from appliance.controller.http.paging import RECENT, list_object
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, OperationFailed, shown
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.models.imported import adapter_base, register
from appliance.store.database import Database, Part
from appliance.store.ids import new_id
from appliance.store.objects import models
from appliance.store.records import operations
from appliance.store.rows import OperationRow, TaskRow, columns

OPERATIONS = "operations"
TIERS = "tiers"
"""Target of the operation that verifies all copies."""

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
        async def given() -> dict[str, Any]:
            for field, text in (("source", body.source), ("origin", body.origin or "")):
                if not text.isprintable():
                    raise InvalidValue(f"The {field} contains control characters.", field)
            if body.name is not None:
                _check_new_name(db, body.name)
            context.quotas.disk.check()  # only the import itself finds out how much more it needs
            return {
                **body.model_dump(include={"source", "origin", "name", "revision"}),
                "adapter": await _adapter(context, body),
            }

        sent = body.model_dump(mode="json")
        return await _begin(context, request, caller, "model.import", body.name or body.source, sent, given)

    @router.post("/models/{name:path}/verify", status_code=202)
    async def verify(name: str, request: Request, caller: Caller) -> JSONResponse:
        return await _begin(context, request, caller, "model.verify", stored_model(db, name).id)

    @router.post("/tiers/verify", status_code=202)
    async def verify_tiers(request: Request, caller: Caller) -> JSONResponse:
        return await _begin(context, request, caller, "tiers.verify", TIERS)

    @router.get("/operations")
    def list_operations(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        return list_object(operations.page(db, **part), view)

    @router.get("/operations/{operation_id}")
    def operation(operation_id: str) -> dict[str, Any]:
        row = operations.find(db, operation_id)
        if row is None:
            raise NotFound(f"No operation {shown(operation_id)}.", param="id", code="operation_not_found")
        return {"operation": view(row)}


def view(row: OperationRow) -> dict[str, Any]:
    return columns(row, "id kind target state progress error result created_s ended_s")


async def _nothing() -> dict[str, Any]:
    return {}


async def _begin(
    context: ControllerContext,
    request: Request,
    caller: Principal,
    action: str,
    target: str,
    body: dict[str, Any] | None = None,
    given: Callable[[], Awaitable[dict[str, Any]]] = _nothing,
) -> JSONResponse:
    """Starts an operation, or answers with the one that an earlier attempt of the request began. One that failed is no
    answer to a mere retry: it may be that of an earlier request.

    Args:
        action: "noun.kind" of the audit row; the kind is the operation's.
        given: checks a new request and returns what the operation begins with. Raises ApiError.
    """
    kind = action.partition(".")[2]

    def begun(operation_id: str) -> OperationRow | None:
        row = operations.find(context.db, operation_id)
        is_failed = row is not None and row.state == "failed"
        return None if is_failed and "idempotency-key" not in request.headers else row

    def make() -> OperationRow:
        for twin in operations.list_all(context.db, "state = 'running' AND kind = ? AND target = ?", kind, target):
            text = f"{kind} of {shown(target)} is already running as operation {twin.id}."
            raise Conflict(text, param=None, code="operation_running")
        progress = _progress(0, None, "", "starting")
        row = OperationRow(new_id("op_"), kind, target, "running", time.time(), progress=progress)
        operations.insert(context.db, row)
        context.tasks.start(OPERATIONS, row.id, caller.key_id, **begins_with)
        return row

    attempt = Attempt(request, caller, f"operations.{action}", [target, body], begun)
    row, new = attempt.earlier(), False
    if row is None:
        begins_with = await given()
        row, new = attempt.once(make)
    record(context, caller, action, target, **(body or {}), **({} if new else {"repeated": True}))
    return JSONResponse({"operation": view(row)}, 202)


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
    """The arguments of `ModelLibrary.import_adapter`; None for a whole model. Raises BadRequest, Conflict."""
    try:
        found = await context.model_ops.find_adapter(body.source, name=body.name, revision=body.revision)
    except OperationFailed as error:
        raise BadRequest(str(error), param="source", code=error.code) from error
    if found is not None:
        name, trained_on, revision = found
        return {"name": name, "revision": revision, **adapter_base(context, name, trained_on, body.base)}
    if body.base is not None:
        raise InvalidValue(
            f"A base belongs to an adapter (adapter_config.json), and {shown(body.source)} is not one.", "base"
        )
    return None


class Operations:
    """Runs operations."""

    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db
        context.tasks.add(Kind(OPERATIONS, self.run, self.fail, "operation"))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = operations.find(self._db, task.id)
        if row is None or row.state != "running":
            return
        progress = _Reports(self._context, row.id)
        try:
            result = await self._result(row, task, progress.report)
        except OperationFailed as error:
            raise TaskFailed(error.code, str(error)) from error
        finally:
            progress.write()
        operations.update(self._db, row.id, state="succeeded", result=result, ended_s=time.time())

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        row = operations.find(self._db, task.id)
        if row is not None and row.state == "running":
            failure = {"code": error.code, "message": str(error), "param": None}
            operations.update(self._db, row.id, state="failed", error=failure, ended_s=time.time())

    async def _result(
        self, row: OperationRow, task: TaskRow, report: Callable[[float, float | None, str, str], None]
    ) -> dict[str, Any]:
        """Raises OperationFailed."""
        ops, given = self._context.model_ops, task.arguments
        if row.kind == "verify" and row.target == TIERS:
            return await ops.verify_tiers(report)
        if row.kind == "verify":
            return await ops.verify(models.list_versions(self._db, row.target), report)
        source, adapter, origin = given["source"], given["adapter"], given["origin"]
        if adapter is not None:
            made, origin = await ops.import_adapter(source, report=report, **adapter), None
        else:
            made = await ops.import_model(source, name=given["name"], revision=given["revision"], report=report)
        caller = caller_of(self._db, task.key_id)
        return await register(self._context, made, caller, source=origin or made.source, adapter=adapter)


class _Reports:
    """Writes reports of any thread: each with a new message, others at most every `progress_every_s`."""

    def __init__(self, context: ControllerContext, operation_id: str):
        self._context, self._id = context, operation_id
        self._last: dict[str, Any] = {}
        self._next_s = 0.0

    def report(self, done: float, total: float | None, unit: str, message: str) -> None:
        is_new = message != self._last.get("message")
        self._last = _progress(done, total, unit, message)
        if is_new or time.monotonic() >= self._next_s:
            self.write()

    def write(self) -> None:
        if self._last:
            operations.update(self._context.db, self._id, progress=self._last)
            self._next_s = time.monotonic() + self._context.config.progress_every_s


def _progress(done: float, total: float | None, unit: str, message: str) -> dict[str, Any]:
    return {"done": done, "total": total, "unit": unit, "message": message}
