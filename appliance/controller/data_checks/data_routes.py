"""POST and GET /v1/files/{id}/check, POST /v1/files/{id}/prepare, GET /v1/files/{id}/lineage: ours, beside OpenAI's.

A request waits for its answer, as an upload does; the work is done in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from appliance.controller.access.model_access import caller_may_use, unknown_model
from appliance.controller.access.naming import resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.data_work import DataWork, check_request, part_of
from appliance.controller.files import storage
from appliance.controller.http.idempotency import Attempt, Carried, Deed
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.jobs import settings
from appliance.store.ids import new_id
from appliance.store.objects import files, job_records
from appliance.store.rows import FileRow
from train.data_checks.options import CHECKS, ORDERS
from train.data_checks.process import BadOption, CheckFailed
from train.methods.methods import DEFAULT, METHODS

ROUTE = "files.prepare"
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
CheckName = Literal[tuple(CHECKS)]  # type: ignore[valid-type]
Share = Annotated[float, Field(gt=0, le=1)]
MOST_FILES, MOST_LISTED = 16, 10_000


class CheckAsked(StrictBody):
    """against: id of a validation file. words: a list of one's own."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    method: Literal[tuple(METHODS)] | None = None  # type: ignore[valid-type]
    against: Name | None = None
    like: Annotated[float, Field(ge=0.7, le=1)] | None = None
    words: Annotated[list[Name], Field(max_length=MOST_LISTED)] | None = None
    leave_out: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)


class Mixed(StrictBody):
    file: Name
    share: Share


class PrepareAsked(CheckAsked):
    drop: Annotated[list[CheckName], Field(max_length=len(CHECKS))] = Field(default_factory=list)
    mask: bool = False
    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    mix: Annotated[list[Mixed], Field(max_length=MOST_FILES)] = Field(default_factory=list)
    order: Literal[tuple(ORDERS)] = ORDERS[0]  # type: ignore[valid-type]
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


def routes(context: ControllerContext, work: DataWork) -> APIRouter:
    router = make_router("/v1/files", FINE_TUNING)
    db = context.db

    @router.post("/{file_id}/check")
    async def check(file_id: str, body: CheckAsked, caller: Caller) -> dict[str, Any]:
        row = storage.known_file(context, file_id, caller)
        with tempfile.TemporaryDirectory(prefix="check-") as folder:
            options = await _options(context, body, caller, Path(folder))
            report = await _run(work, row.owner, check_request(context, [row], options))
        report |= _epoch(context, body, report)
        if files.find(db, row.id, viewer=None, now_s=0) is not None:
            files.update(db, row.id, data_check=report, check_status="done")
        return report

    @router.get("/{file_id}/check")
    async def checked(file_id: str, caller: Caller) -> dict[str, Any]:
        """The newest report: of the upload, or of the last check that was asked for."""
        row = storage.known_file(context, file_id, caller)
        if row.data_check is None:
            waits = "is being checked; ask again" if row.check_status else "has not been checked"
            raise Conflict(f"The file {row.id} {waits}.", param="id", code="no_check")
        return row.data_check

    @router.get("/{file_id}/lineage")
    async def lineage(file_id: str, caller: Caller) -> dict[str, Any]:
        """What a prepared file was made of."""
        row = storage.known_file(context, file_id, caller)
        if row.lineage is None:
            raise Conflict(f"The file {row.id} was uploaded and not prepared here.", param="id", code="no_lineage")
        return row.lineage

    @router.post("/{file_id}/prepare")
    async def prepare(file_id: str, body: PrepareAsked, request: Request, caller: Caller) -> dict[str, Any]:
        first = storage.known_file(context, file_id, caller)
        mixed = [storage.known_file(context, one.file, caller, "mix") for one in body.mix if one.file != first.id]
        carried = Carried(db, context.config, Attempt.of(request, caller, ROUTE, [file_id, body.model_dump()]))
        ids = [new_id("file-") for _ in range(1 if body.split is None else 2)]
        if (earlier := carried.before(lambda: Deed.of(ids=ids))) is not None:
            return _told_again(context, earlier["ids"], caller)
        try:
            return await _prepared(context, work, body, [first, *mixed], ids, caller)
        except BaseException:
            carried.came_to_nothing()
            raise

    return router


async def _prepared(
    context: ControllerContext,
    work: DataWork,
    body: PrepareAsked,
    rows: list[FileRow],
    ids: list[str],
    caller: Principal,
) -> dict[str, Any]:
    """Makes the files, and answers with what was made of what."""
    places = [part_of(context.files_dir / one) for one in ids]
    paths = {row.id: str(context.files_dir / row.id) for row in rows}
    asked = {
        **body.model_dump(include={"drop", "mask", "split", "order", "seed"}),
        "mix": [[paths[one.file], one.share] for one in body.mix],
    }
    with context.quotas.receiving(caller) as took:
        took(sum(row.bytes for row in rows))
        try:
            with tempfile.TemporaryDirectory(prefix="prepare-") as folder:
                more = {
                    "prepare": asked,
                    "target": str(places[0]),
                    "validation": str(places[1]) if len(places) > 1 else None,
                }
                options = await _options(context, body, caller, Path(folder))
                made = await _run(work, rows[0].owner, check_request(context, rows, options, **more))
            del made["report"]
            made["id"] = ids[0]
            made["asked"]["mix"] = [[one.file, one.share] for one in body.mix]
            names = [_name(rows[0].filename, number) for number in range(len(ids))]
            for number, one in enumerate(made["made"]):
                one |= {"file": ids[number], "id": ids[number], "filename": names[number]}
            new = [
                await to_thread.run_sync(_row, one, place, rows[0], made, caller)
                for one, place in zip(made["made"], places, strict=True)
            ]
            for row, place in zip(new, places, strict=True):
                with storage.with_row(context, row.id):
                    os.rename(place, context.files_dir / row.id)
                    files.insert(context.db, row)
        finally:
            for place in places:
                place.unlink(missing_ok=True)
    return made


def _row(made: dict[str, Any], path: Path, source: FileRow, lineage: dict[str, Any], caller: Principal) -> FileRow:
    return FileRow(
        id=made["id"],
        filename=made["filename"],
        purpose="fine-tune",
        bytes=path.stat().st_size,
        sha256=made["sha256"],
        status="processed",
        check_status="waiting",
        lineage=lineage,
        key_id=caller.key_id if source.owner == caller.owner else source.key_id,
        owner=source.owner,
        created_s=time.time(),
    )


def _name(filename: str, number: int) -> str:
    stem = filename.rpartition(".")[0] or filename
    return f"{stem}.prepared{'.valid' if number else ''}.jsonl"


def _told_again(context: ControllerContext, ids: list[str], caller: Principal) -> dict[str, Any]:
    row = files.find(context.db, ids[0], viewer=caller.viewer, now_s=time.time())
    if row is None or row.lineage is None:
        raise Conflict("The same request is being carried out, or its file is gone.", code="already_asked")
    return row.lineage


async def _run(work: DataWork, owner: str, request: dict[str, Any]) -> dict[str, Any]:
    """Raises BadRequest, and ApiError for one too many."""
    try:
        return await work.run(owner, request)
    except BadOption as error:
        raise BadRequest(f"{error}.", code="invalid_value") from error
    except CheckFailed as error:
        raise BadRequest(f"{error}.", code="invalid_training_file") from error


async def _options(context: ControllerContext, body: CheckAsked, caller: Principal, folder: Path) -> dict[str, Any]:
    """Options of a check as its process takes them. Raises BadRequest, NotFound."""
    options: dict[str, Any] = body.model_dump(include={"max_tokens", "like", "leave_out", "method"}, exclude_none=True)
    if body.model is not None:
        base = resolve(context.db, body.model)
        if base is None or not caller_may_use(context.db, caller, body.model):
            raise unknown_model(body.model)
        directory = settings.tokenizer_of(context, base)
        if directory is None:
            raise BadRequest(
                f"The tokenizer of {base.name} is not on this box's disk now; ask again once the model is.",
                param="model",
                code="model_not_ready",
            )
        options |= {"model": str(directory)}
        if "max_tokens" not in options and base.model.max_model_len:
            options["max_tokens"] = base.model.max_model_len
    if body.against is not None:
        options["against"] = str(context.files_dir / storage.known_file(context, body.against, caller, "against").id)
    if body.words is not None:
        options["words"] = str(folder / "words.txt")
        await to_thread.run_sync((folder / "words.txt").write_text, "\n".join(body.words))
    return options


def _epoch(context: ControllerContext, body: CheckAsked, report: dict[str, Any]) -> dict[str, Any]:
    """{"epoch"} with the cost of one over all of it, at the speed that jobs like it have had here."""
    if body.model is None:
        return {}
    hours = {}
    for name, full in (("lora", False), ("full", True)):
        speeds = job_records.device_speeds(context.db, body.model, body.method or DEFAULT.name, full)
        hours[name] = report["tokens"]["total"] / median(speeds) / 3600 if speeds else None
    return {"epoch": {"model": body.model, "device_hours": hours}}
