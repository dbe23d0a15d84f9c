"""Long operations on models behind the admin API: import and verify.

Each is a task with a row of its own, which has its progress and its result. After a restart it starts over from what is
on disk.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.records import AdapterBase, AdapterFound, Progress, Report
from appliance.controller.models.imported import register, register_adapter
from appliance.controller.models.removal import paths_of
from appliance.store.ids import new_id
from appliance.store.objects import models
from appliance.store.records import operations
from appliance.store.rows import OperationRow, TaskRow, columns

OPERATIONS = "operations"
TIERS = "tiers"
"""Target of the operation that verifies all copies."""


class Operations:
    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db
        context.tasks.add(Kind(OPERATIONS, self.run, self.fail, "operation"))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = operations.find(self._db, task.id)
        if row is None or row.state != "running":
            return
        progress = _Progress(self._context, row.id)
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

    async def _result(self, row: OperationRow, task: TaskRow, report: Report) -> dict[str, Any]:
        """Raises OperationFailed."""
        context, ops, given = self._context, self._context.model_ops, task.arguments
        caller = caller_of(self._db, task.key_id)
        if row.kind == "verify":
            if row.target == TIERS:
                return await ops.verify_tiers(report)
            paths = [paths_of(one) for one in models.list_versions(self._db, row.target)]
            return await ops.verify(row.target, paths, report)
        if given["adapter"] is not None:
            found, base = AdapterFound(*given["adapter"]["found"]), AdapterBase(*given["adapter"]["base"])
            made = await ops.import_adapter(given["source"], found=found, base=base, report=report)
            return await register_adapter(context, made, base, caller)
        made = await ops.import_model(given["source"], name=given["name"], revision=given["revision"], report=report)
        return await register(context, replace(made, source=given["origin"] or made.source), caller)


def start(context: ControllerContext, kind: str, target: str, key_id: str | None, **given: Any) -> OperationRow:
    """Call it in a transaction. given: what the operation begins with."""
    row = OperationRow(
        id=new_id("op_"),
        kind=kind,
        target=target,
        state="running",
        created_s=time.time(),
        progress=asdict(Progress(0, None, "", "starting")),
    )
    operations.insert(context.db, row)
    context.tasks.start(OPERATIONS, row.id, key_id, **given)
    return row


class _Progress:
    """Writes reports of any thread: each with a new message, others at most every `progress_every_s`."""

    def __init__(self, context: ControllerContext, operation_id: str):
        self._context, self._id = context, operation_id
        self._last: Progress | None = None
        self._next_s = 0.0

    def report(self, progress: Progress) -> None:
        is_new = self._last is None or progress.message != self._last.message
        self._last = progress
        if is_new or time.monotonic() >= self._next_s:
            self.write()

    def write(self) -> None:
        if self._last is not None:
            operations.update(self._context.db, self._id, progress=asdict(self._last))
            self._next_s = time.monotonic() + self._context.config.progress_every_s


def view(row: OperationRow) -> dict[str, Any]:
    return columns(row, "id kind target state progress error result created_s ended_s")
