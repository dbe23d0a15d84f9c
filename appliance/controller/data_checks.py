"""Checks of training data: POST and GET /v1/files/{id}/check, ours beside OpenAI's, and one after every upload.

A request waits for its answer, as an upload does; the work is done in a process of its own, `train.data_checks`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed
from appliance.controller.files.storage import DATA_CHECKS, FILES
from appliance.controller.http.routers import unaudited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.controller.jobs import settings
from appliance.store.objects import files
from appliance.store.rows import TaskRow
from train.data_checks.process import BadOption, CheckFailed, report_apart
from train.methods.methods import METHODS

AT_ONCE = 1
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CheckRequest(StrictBody):
    """against: id of a validation file. max_tokens: default: the model's context."""

    model: Name | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    against: Name | None = None


class DataWork:
    """One process at a time for each owner's requests, and one for all uploads."""

    def __init__(self, context: ControllerContext):
        self._context = context
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        context.tasks.add(Kind(DATA_CHECKS, self.check_upload, self.fail, at_once=AT_ONCE, per_owner=1))

    async def check_upload(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        try:
            report = await self._process(task.id, {})
        except CheckFailed as error:
            raise TaskFailed("check_failed", str(error)) from error
        self.end(task.id, "done", report, "waiting")

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        self.end(task.id, "failed", {"error": str(error)}, "waiting")

    def end(self, file_id: str, status: str, report: dict[str, Any], before: str = "") -> None:
        """before: the status that it has, unless it was deleted or checked by request; any if it is empty."""
        row = files.find(self._context.db, file_id, viewer=None, now_s=0)
        if row is not None and (not before or row.check_status == before):
            files.update(self._context.db, file_id, data_check=report, check_status=status)

    async def run(self, owner: str, file_id: str, options: dict[str, Any]) -> dict[str, Any]:
        """The report on a file; ends its process when it is cancelled. Raises BadOption, CheckFailed.

        options: of `train.data_checks.process.report_on`."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            return await self._process(file_id, options)

    async def _process(self, file_id: str, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return await report_apart(self._context.files_dir / file_id, file_id, **options)
        except CheckFailed as error:  # its messages name no path of the box
            raise CheckFailed(str(error).replace(f"{self._context.files_dir}/", "")) from error


def routes(context: ControllerContext, work: DataWork) -> APIRouter:
    router, db = FILES.router(), context.db

    @router.post("/{file_id}/check")
    @unaudited  # reads a file; its report alone is kept
    async def check(file_id: str, body: CheckRequest, caller: Caller) -> dict[str, Any]:
        row = FILES.known(db, file_id, caller)
        options = _options(context, body, caller)
        try:
            report = await work.run(row.owner, row.id, options)
        except (BadOption, CheckFailed) as error:
            code = "invalid_value" if isinstance(error, BadOption) else "invalid_training_file"
            raise BadRequest(f"{error}.", code=code) from error
        work.end(row.id, "done", report)
        return report

    @router.get("/{file_id}/check")
    def checked(file_id: str, caller: Caller) -> dict[str, Any]:
        """The newest report: of the upload, or of the last requested check."""
        row = FILES.known(db, file_id, caller)
        if row.data_check is None:
            waits = "is being checked; ask again" if row.check_status else "has not been checked"
            raise Conflict(f"The file {row.id} {waits}.", "id", "no_check")
        return row.data_check

    return router


def _options(context: ControllerContext, body: CheckRequest, caller: Principal) -> dict[str, Any]:
    """Raises BadRequest, NotFound."""
    options: dict[str, Any] = {"max_tokens": body.max_tokens, "method": body.method}
    if body.model is not None:
        base = usable_model(context.db, caller, body.model)
        directory = settings.tokenizer_of(context, base)
        if directory is None:
            why = f"The tokenizer of {base.name} is not on this box's disk now; ask again once the model is."
            raise BadRequest(why, "model", "model_not_ready")
        options |= {"model": str(directory), "max_tokens": body.max_tokens or base.model.max_model_len}
    if body.against is not None:
        options["against"] = str(context.files_dir / FILES.known(context.db, body.against, caller, "against").id)
    return options
