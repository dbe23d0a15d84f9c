"""POST and GET /v1/files/{id}/check, POST /v1/files/{id}/prepare, GET /v1/files/{id}/lineage: ours, beside OpenAI's.

A request waits for its answer, as an upload does; the work is done in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.data_work import DataWork
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES
from appliance.controller.http.audited import unaudited
from appliance.controller.http.idempotency import Attempt
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict, KeyRevoked
from appliance.controller.interfaces.principal import Caller, Principal, check_stands
from appliance.controller.jobs import settings
from appliance.store.ids import new_id
from appliance.store.objects import files
from appliance.store.records import keys
from appliance.store.rows import FileRow
from train.data_checks.process import CHECKS, BadOption, CheckFailed, CheckName
from train.methods.methods import METHODS

ROUTE = "files.prepare"
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CheckRequest(StrictBody):
    """against: id of a validation file. max_tokens: default: the model's context."""

    model: Name | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    against: Name | None = None


class PrepareRequest(CheckRequest):
    """See train.data_checks.prepare."""

    drop: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)
    mask: bool = False
    split: Annotated[float, Field(gt=0, lt=1)] | None = None


def routes(context: ControllerContext, work: DataWork) -> APIRouter:
    router, db = FILES.router(), context.db

    @router.post("/{file_id}/check")
    @unaudited  # reads a file; its report alone is kept
    async def check(file_id: str, body: CheckRequest, caller: Caller) -> dict[str, Any]:
        row = FILES.known(context.db, file_id, caller)
        report = await _run(context, work, row, body, caller)
        if files.find(db, row.id, viewer=None, now_s=0) is not None:
            files.update(db, row.id, data_check=report, check_status="done")
        return report

    @router.get("/{file_id}/check")
    def checked(file_id: str, caller: Caller) -> dict[str, Any]:
        """The newest report: of the upload, or of the last requested check."""
        row = FILES.known(context.db, file_id, caller)
        if row.data_check is None:
            waits = "is being checked; ask again" if row.check_status else "has not been checked"
            raise Conflict(f"The file {row.id} {waits}.", param="id", code="no_check")
        return row.data_check

    @router.get("/{file_id}/lineage")
    def lineage(file_id: str, caller: Caller) -> dict[str, Any]:
        """The source of a prepared file."""
        row = FILES.known(context.db, file_id, caller)
        if row.lineage is None:
            raise Conflict(f"The file {row.id} was uploaded and not prepared here.", param="id", code="no_lineage")
        return row.lineage

    @router.post("/{file_id}/prepare")
    async def prepare(file_id: str, body: PrepareRequest, request: Request, caller: Caller) -> dict[str, Any]:
        known = partial(files.find, db, viewer=caller.viewer)
        attempt = Attempt(request, caller, ROUTE, [file_id, body.model_dump()], known)
        if (earlier := attempt.earlier()) is not None:
            return earlier.lineage or {}
        source = FILES.known(db, file_id, caller)
        ids = [new_id("file-") for _ in range(1 if body.split is None else 2)]
        context.quotas.check(caller, "files", source.bytes)
        with storage.growing(context, *ids) as places:
            rows = await _prepared(context, work, source, body, ids, places, caller)

            def make() -> FileRow:
                keep(context, caller, rows, places)
                return rows[0]

            made, _ = attempt.once(make)
        return made.lineage or {}

    return router


def keep(context: ControllerContext, caller: Principal, rows: list[FileRow], places: list[Path]) -> None:
    """Store prepared files whose bytes are at `places`. Call in a transaction, within `storage.growing`. Raises
    KeyRevoked for a key that has ended meanwhile, or got another secret; SessionEnded."""
    check_stands(context.db, caller)
    for row in rows:
        if how := keys.how_ended(context.db, row.key_id):
            raise KeyRevoked(how)
    for row, place in zip(rows, places, strict=True):
        storage.keep(context, row, place)


async def _prepared(
    context: ControllerContext,
    work: DataWork,
    source: FileRow,
    body: PrepareRequest,
    ids: list[str],
    places: list[Path],
    caller: Principal,
) -> list[FileRow]:
    """Rows of the new files under these ids, whose bytes are written to `places`. Prepared from another owner's file,
    they belong to that owner."""
    chosen = body.model_dump(include={"drop", "mask", "split"})
    lineage = await _run(context, work, source, body, caller, prepare=chosen, targets=list(map(str, places)))
    lineage |= {"id": ids[0], "from": lineage["from"] | {"file": source.id}}
    lineage["check"] = body.model_dump(include=set(CheckRequest.model_fields), exclude_defaults=True)
    stem = source.filename.rpartition(".")[0] or source.filename
    owner_key = {} if source.owner == caller.owner else {"key_id": source.key_id}
    for made, file_id, kind in zip(lineage["made"], ids, ("", ".valid"), strict=False):
        made |= {"file": file_id, "id": file_id, "filename": f"{stem}.prepared{kind}.jsonl"}
    rows = []
    for made, place in zip(lineage["made"], places, strict=True):
        row = await storage.described(
            context, made["id"], place, filename=made["filename"], sha256=made["sha256"], caller=caller
        )
        rows.append(replace(row, lineage=lineage, owner=source.owner, **owner_key))
    return rows


async def _run(
    context: ControllerContext, work: DataWork, row: FileRow, body: CheckRequest, caller: Principal, **more: Any
) -> dict[str, Any]:
    """Raises BadRequest, NotFound."""
    options: dict[str, Any] = {"max_tokens": body.max_tokens, "method": body.method}
    if body.model is not None:
        base = usable_model(context.db, caller, body.model)
        directory = settings.tokenizer_of(context, base)
        if directory is None:
            raise BadRequest(
                f"The tokenizer of {base.name} is not on this box's disk now; ask again once the model is.",
                param="model",
                code="model_not_ready",
            )
        await settings.refuse_unsafe(context, base)
        options |= {"model": str(directory), "max_tokens": body.max_tokens or base.model.max_model_len}
    if body.against is not None:
        options["against"] = str(context.files_dir / FILES.known(context.db, body.against, caller, "against").id)
    try:
        return await work.run(row.owner, row.id, check=options, **more)
    except BadOption as error:
        raise BadRequest(f"{error}.", code="invalid_value") from error
    except CheckFailed as error:
        raise BadRequest(f"{error}.", code="invalid_training_file") from error
