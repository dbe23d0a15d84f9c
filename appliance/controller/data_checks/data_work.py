"""Runs `train.data_checks` on files of the box: by request, and on every upload of training data."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.context.context import ControllerContext
from appliance.store.objects import files
from runtime.processes.ended import heard_out
from train.data_checks.process import CheckFailed, answer_of, command_of

LOOK_EVERY_S = 5.0


class DataWork:
    """One process at a time for each owner, and one for all uploads."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: str, file_id: str, **request: Any) -> dict[str, Any]:
        """The answer to a request of train.data_checks.process. Raises BadOption, CheckFailed; ends the process when it
        is cancelled."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            return await self._process({**request, "file": str(self._context.files_dir / file_id), "name": file_id})

    async def look(self) -> None:
        """Check the waiting uploads: owners take turns, each one's smallest first."""
        db, last = self._context.db, ""
        while (row := files.unchecked(db, last)) is not None:
            last = row.owner
            request = {"file": str(self._context.files_dir / row.id), "name": row.id, "check": {}}
            try:
                found: dict[str, Any] = {"data_check": await self._process(request), "check_status": "done"}
            except CheckFailed as error:
                found = {"data_check": {"error": str(error)}, "check_status": "failed"}
            if files.find(db, row.id, viewer=None, now_s=0) is not None:  # the file may have been deleted meanwhile
                files.update(db, row.id, **found)

    async def _process(self, request: dict[str, Any]) -> dict[str, Any]:
        status, out, err = await heard_out(*command_of(request))
        try:
            return answer_of(status, out, err)
        except CheckFailed as error:  # its messages name no path of the box
            raise CheckFailed(str(error).replace(f"{self._context.files_dir}/", "")) from error
