"""/admin/v1/operations: imports of models, each a task with a row of its own that has its progress and its result.

After a restart one starts over from what is on disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import StringConstraints

from appliance.controller.access.model_access import MODEL_NAME_RULE, caller_of, is_model_name, made_by_jobs
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.http.resource import RECENT, list_object
from appliance.controller.http.routers import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, OperationFailed, shown
from appliance.controller.interfaces.principal import Caller
from appliance.controller.models.imported import adapter_base, register
from appliance.store.database import Part
from appliance.store.ids import new_id
from appliance.store.objects import models
from appliance.store.records import operations
from appliance.store.rows import OperationRow, TaskRow, columns

OPERATIONS = "operations"
PROGRESS_EVERY_S = 0.5
"""Progress is written to the store at most this often, but for a new message."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Import(StrictBody):
    """origin: where the files of a path came from, kept as the model's source."""

    source: Text
    origin: Text | None = None
    name: Text | None = None
    base: Text | None = None
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,255}$")] | None = None


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router; before those of models, whose names may contain slashes."""
    db = context.db

    @router.post("/models/import", status_code=202)
    async def import_model(body: Import, caller: Caller) -> dict[str, Any]:
        for field, text in (("source", body.source), ("origin", body.origin or "")):
            if not text.isprintable():
                raise InvalidValue(f"The {field} contains control characters.", field)
        if (name := body.name) is not None:
            if not is_model_name(name):
                raise InvalidValue(f"Invalid model name {shown(name)}: expected {MODEL_NAME_RULE}.", "name")
            if name.startswith("ft:"):
                raise InvalidValue("Names that begin with 'ft:' belong to fine-tuned models.", "name")
            if models.find(db, name) is not None or made_by_jobs(db, name):
                remedy = "delete it first or choose another name"
                raise Conflict(f"The model {shown(name)} exists, or a job makes it; {remedy}.", "name", "model_exists")
        context.quotas.disk.check()  # only the import itself finds out how much more it needs
        arguments = {**columns(body, "source origin name revision"), "adapter": await _adapter(context, body)}
        target, progress = name or body.source, {"done": 0, "total": None, "unit": "", "message": "starting"}
        with db.transaction():
            for twin in operations.list_all(db, "state = 'running' AND target = ?", target):
                text = f"import of {shown(target)} is already running as operation {twin.id}."
                raise Conflict(text, code="operation_running")
            row = OperationRow(new_id("op_"), "import", target, "running", time.time(), progress=progress)
            operations.insert(db, row)
            context.tasks.start(OPERATIONS, row.id, caller.key_id, **arguments)
            record(context, caller, "model.import", target, **body.model_dump())
        return {"operation": view(row)}

    @router.get("/operations")
    def list_operations(part: Annotated[Part, RECENT]) -> dict[str, Any]:
        return list_object(operations.page(db, **part), view)

    @router.get("/operations/{operation_id}")
    def operation(operation_id: str) -> dict[str, Any]:
        if (row := operations.find(db, operation_id)) is None:
            raise NotFound(f"No operation {shown(operation_id)}.", "id", "operation_not_found")
        return {"operation": view(row)}


def view(row: OperationRow) -> dict[str, Any]:
    return columns(row, "id kind target state progress error result created_s ended_s")


async def _adapter(context: ControllerContext, body: Import) -> dict[str, Any] | None:
    """The arguments of `ModelLibrary.import_adapter`; None for a whole model. Raises BadRequest, Conflict."""
    try:
        ops = context.model_ops
        found = await ops.run(ops.library.find_adapter, body.source, name=body.name, revision=body.revision)
    except OperationFailed as error:
        raise BadRequest(str(error), "source", error.code) from error
    if found is not None:
        name, trained_on, revision = found
        return {"name": name, "revision": revision, **adapter_base(context, name, trained_on, body.base)}
    if body.base is not None:
        why = f"A base belongs to an adapter (adapter_config.json), and {shown(body.source)} is not one."
        raise InvalidValue(why, "base")
    return None


def kind(context: ControllerContext) -> Kind:
    """The kind of task that imports are."""
    db, ops = context.db, context.model_ops

    async def run(task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = operations.find(db, task.id)
        if row is None or row.state != "running":
            return
        progress, write_s = row.progress, 0.0

        def report(done: float, total: float | None, unit: str, message: str) -> None:
            """Called from any thread."""
            nonlocal progress, write_s
            is_new = message != progress["message"]
            progress = {"done": done, "total": total, "unit": unit, "message": message}
            if is_new or time.monotonic() >= write_s:
                operations.update(db, task.id, progress=progress)
                write_s = time.monotonic() + PROGRESS_EVERY_S

        given = task.arguments
        source, adapter = given["source"], given["adapter"]
        try:
            if adapter is not None:
                options = {**adapter, "base_path": Path(adapter["base_path"])}
                made, origin = await ops.run(ops.library.import_adapter, source, report=report, **options), None
            else:
                names = {"name": given["name"], "revision": given["revision"]}
                made, origin = await ops.run(ops.library.import_model, source, report=report, **names), given["origin"]
            caller = caller_of(db, task.key_id)
            result = await register(context, made, caller, source=origin or made.source, adapter=adapter)
        except OperationFailed as error:
            raise TaskFailed(error.code, str(error)) from error
        operations.update(db, row.id, state="succeeded", result=result, progress=progress, ended_s=time.time())

    async def fail(task: TaskRow, error: TaskFailed) -> None:
        row = operations.find(db, task.id)
        if row is not None and row.state == "running":
            failure = {"code": error.code, "message": str(error), "param": None}
            operations.update(db, row.id, state="failed", error=failure, ended_s=time.time())

    return Kind(OPERATIONS, run, fail, "operation")
