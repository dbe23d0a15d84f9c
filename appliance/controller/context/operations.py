"""Long operations behind the admin API: started at once, tracked by a row in the store.

An operation lives in the controller's process. A restart marks an interrupted one as failed; repeating the request
starts over from what is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import OperationFailed
from appliance.controller.interfaces.records import Progress, Report
from appliance.store.ids import new_id
from appliance.store.records import operations
from appliance.store.rows import OperationRow, columns
from runtime.background_tasks import RunningTasks

Work = Callable[[Report], Awaitable[dict[str, Any]]]


class Operations:
    """Starts work as tasks of the controller's loop and writes its progress, at most every `progress_every_s`."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self.tasks = RunningTasks()

    def fail_interrupted(self) -> None:
        """At start: mark operations still "running" as failed; they ended with the previous controller."""
        for row in operations.list_running(self._context.db):
            operations.fail(
                self._context.db,
                row.id,
                {
                    "code": "interrupted",
                    "message": "The controller restarted before this was done; ask again.",
                    "param": None,
                },
            )

    def running(self, kind: str, target: str) -> OperationRow | None:
        rows = operations.list_running(self._context.db)
        return next((row for row in rows if row.kind == kind and row.target == target), None)

    def insert(self, kind: str, target: str) -> OperationRow:
        """Its row; `begin` it once that is in the store for good."""
        row = OperationRow(
            id=new_id("op_"),
            kind=kind,
            target=target,
            state="running",
            created_s=time.time(),
            progress=asdict(Progress(0, None, "", "starting")),
        )
        operations.insert(self._context.db, row)
        return row

    def begin(self, row: OperationRow, work: Work) -> None:
        """`work` gets a `report` function (any thread may call it) and returns the result as a JSON object."""
        self.tasks.add(asyncio.create_task(self._run(row.id, work), name=f"{row.kind} {row.target}"))

    async def _run(self, operation_id: str, work: Work) -> None:
        db = self._context.db
        progress = _Progress(self._context, operation_id)
        try:
            result = await work(progress.report)
        except OperationFailed as error:
            progress.write()
            operations.fail(db, operation_id, {"code": error.code, "message": str(error), "param": None})
        except asyncio.CancelledError:
            progress.write()
            operations.fail(
                db,
                operation_id,
                {
                    "code": "interrupted",
                    "message": "The controller was stopped before this was done; ask again.",
                    "param": None,
                },
            )
            raise
        except Exception as error:
            # An uncaught task exception would only be logged when collected: the caller must see the operation end.
            progress.write()
            operations.fail(
                db,
                operation_id,
                {
                    "code": "internal_error",
                    "message": f"{type(error).__name__}: {error}",
                    "param": None,
                },
            )
            raise
        else:
            progress.write()
            operations.succeed(db, operation_id, result)


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
            operations.set_progress(self._context.db, self._id, asdict(self._last))
            self._next_s = time.monotonic() + self._context.config.progress_every_s


def view(row: OperationRow) -> dict[str, Any]:
    return columns(row, "id kind target state progress error result created_s ended_s")
