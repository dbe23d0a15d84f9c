"""Runs `train.data_checks` on files of the box: by request, and on every upload of training data."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.files.storage import DATA_CHECKS
from appliance.store.objects import files
from appliance.store.rows import TaskRow
from runtime.processes.ended import heard_out
from train.data_checks.process import CheckFailed, answer_of, command_of

AT_ONCE = 1


class DataWork:
    """One process at a time for each owner's requests, and one for all uploads."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        context.tasks.add(Kind(DATA_CHECKS, self.check_upload, self.fail, at_once=AT_ONCE, per_owner=1))

    async def run(self, owner: str, file_id: str, **request: Any) -> dict[str, Any]:
        """The answer to a request of train.data_checks.process. Raises BadOption, CheckFailed; ends the process when it
        is cancelled."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            return await self._process({**request, "file": str(self._context.files_dir / file_id), "name": file_id})

    async def check_upload(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        request = {"file": str(self._context.files_dir / task.id), "name": task.id, "check": {}}
        try:
            self._end(task, {"data_check": await self._process(request), "check_status": "done"})
        except CheckFailed as error:
            raise TaskFailed("check_failed", str(error)) from error

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self._end(task, {"data_check": {"error": str(error)}, "check_status": "failed"})

    def _end(self, task: TaskRow, found: dict[str, Any]) -> None:
        row = files.find(self._context.db, task.id, viewer=None, now_s=0)
        if row is not None and row.check_status == "waiting":  # else it was deleted, or checked by request
            files.update(self._context.db, task.id, **found)

    async def _process(self, request: dict[str, Any]) -> dict[str, Any]:
        status, out, err = await heard_out(*command_of(request))
        try:
            return answer_of(status, out, err)
        except CheckFailed as error:  # its messages name no path of the box
            raise CheckFailed(str(error).replace(f"{self._context.files_dir}/", "")) from error
