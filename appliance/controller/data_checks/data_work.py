"""Runs `train.data_checks` on files of the box: when somebody asks, and on every upload of training data."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import LimitReached
from appliance.store.objects import files
from appliance.store.rows import FileRow
from runtime.processes.ended import heard_out
from train.data_checks.process import CheckFailed, answer_of, command_of

LOOK_EVERY_S = 5.0
SMALL, LARGE = range(16 << 20), range(16 << 20, 1 << 62)
"""Sizes of uploads in bytes. Small and large ones are checked beside each other, so that a file that is made to take
hours delays large ones only."""
# The most that one owner may have at the same time; the first of them runs.
_MOST_WAITING = 4


class DataWork:
    """One process for each owner at a time, and for all uploads one for the small and one for the large ones."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()

    async def run(self, owner: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of train.data_checks.process, whose files are named by their ids in it. Raises
        LimitReached for one too many of this owner, BadOption, CheckFailed; ends the process when it is cancelled."""
        if self._waiting[owner] >= _MOST_WAITING:
            text = f"{_MOST_WAITING} checks of your data are under way; wait for one to end."
            raise LimitReached(text, retry=True)
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with turn:
                return await self._process(request)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    async def look(self, sizes: range = files.ANY_SIZE) -> None:
        """Check the waiting uploads whose size is in this range: owners take turns, each one's smallest first."""
        db, last = self._context.db, ""
        while (row := files.unchecked(db, last, sizes)) is not None:
            last = row.owner
            request = check_request(self._context, [row], {})
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


def check_request(
    context: ControllerContext, rows: Sequence[FileRow], check: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """For `DataWork.run`: these files by their ids."""
    paths = [str(context.files_dir / row.id) for row in rows]
    return {"files": paths, "names": [row.id for row in rows], "check": check, **more}
