"""POST and GET /v1/files/{id}/check, POST /v1/files/{id}/prepare, GET /v1/files/{id}/lineage: ours, beside OpenAI's.

A request waits for its answer, as an upload does; the work is done in a process of its own.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.carry_out import check_file, prepared_files
from appliance.controller.data_checks.data_work import DataWork
from appliance.controller.data_checks.requests import CheckRequest, PrepareRequest
from appliance.controller.files import storage
from appliance.controller.http.idempotency import Attempt, Carried, Deed
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.ids import new_id
from appliance.store.objects import files

ROUTE = "files.prepare"


def routes(context: ControllerContext, work: DataWork) -> APIRouter:
    router = make_router("/v1/files", FINE_TUNING)
    db = context.db

    @router.post("/{file_id}/check")
    async def check(file_id: str, body: CheckRequest, caller: Caller) -> dict[str, Any]:
        row = storage.known_file(context, file_id, caller)
        return await check_file(context, work, row, body, caller)

    @router.get("/{file_id}/check")
    def checked(file_id: str, caller: Caller) -> dict[str, Any]:
        """The newest report: of the upload, or of the last check that was asked for."""
        row = storage.known_file(context, file_id, caller)
        if row.data_check is None:
            waits = "is being checked; ask again" if row.check_status else "has not been checked"
            raise Conflict(f"The file {row.id} {waits}.", param="id", code="no_check")
        return row.data_check

    @router.get("/{file_id}/lineage")
    def lineage(file_id: str, caller: Caller) -> dict[str, Any]:
        """What a prepared file was made of."""
        row = storage.known_file(context, file_id, caller)
        if row.lineage is None:
            raise Conflict(f"The file {row.id} was uploaded and not prepared here.", param="id", code="no_lineage")
        return row.lineage

    @router.post("/{file_id}/prepare")
    async def prepare(file_id: str, body: PrepareRequest, request: Request, caller: Caller) -> dict[str, Any]:
        carried = Carried(db, context.config, Attempt.of(request, caller, ROUTE, [file_id, body.model_dump()]))
        if (done := carried.done()) is not None:
            return _told_again(context, done["ids"], caller)
        first = storage.known_file(context, file_id, caller)
        mixed = [storage.known_file(context, one.file, caller, "mix") for one in body.mix if one.file != first.id]
        ids = [new_id("file-") for _ in range(1 if body.split is None else 2)]
        if (earlier := carried.before(lambda: Deed.of(ids=ids))) is not None:
            return _told_again(context, earlier["ids"], caller)
        try:
            async with prepared_files(context, work, body, [first, *mixed], ids, caller) as made:
                with storage.with_row(context, *ids):
                    made.keep(context)
            return made.lineage
        except BaseException:
            carried.came_to_nothing()
            raise

    return router


def _told_again(context: ControllerContext, ids: list[str], caller: Principal) -> dict[str, Any]:
    row = files.find(context.db, ids[0], viewer=caller.viewer, now_s=time.time())
    if row is None or row.lineage is None:
        raise Conflict("The same request is being carried out, or its file is gone.", code="already_asked")
    return row.lineage
