"""Checks a file of the box and prepares new files from it, for routes and for everything else in the box."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from anyio import to_thread

from appliance.controller.access.model_access import usable_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.data_checks.data_work import DataWork, check_request
from appliance.controller.data_checks.requests import CheckRequest, PrepareRequest
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import BadRequest, KeyRevoked
from appliance.controller.interfaces.principal import Principal, check_stands
from appliance.controller.jobs import settings
from appliance.store.objects import files, job_records
from appliance.store.records import keys
from appliance.store.rows import FileRow
from train.data_checks.process import BadOption, CheckFailed
from train.methods.methods import DEFAULT


async def check_file(
    context: ControllerContext, work: DataWork, row: FileRow, body: CheckRequest, caller: Principal
) -> dict[str, Any]:
    """The report; it also becomes the file's own. Raises ApiError: for the request, for what is wrong with the file,
    and for one request too many."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        options = await _options(context, body, caller, Path(folder))
        report = await _run(work, row.owner, check_request(context, [row], options))
    report |= await _epoch(context, body, report, caller)
    if files.find(context.db, row.id, viewer=None, now_s=0) is not None:
        files.update(context.db, row.id, data_check=report, check_status="done")
    return report


@dataclass(frozen=True, slots=True)
class Prepared:
    """rows: of the new files, whose bytes are at `places` as long as they are not kept."""

    lineage: dict[str, Any]
    rows: list[FileRow]
    places: list[Path]
    caller: Principal

    def keep(self, context: ControllerContext) -> None:
        """Call within `storage.with_row`. Raises KeyRevoked for a key that has ended while they were made,
        or got another secret; SessionEnded."""
        check_stands(context.db, self.caller)
        for row in self.rows:
            if how := keys.how_ended(context.db, row.key_id):
                raise KeyRevoked(how)
        for row, place in zip(self.rows, self.places, strict=True):
            storage.keep(context, row, place)


@asynccontextmanager
async def prepared_files(
    context: ControllerContext,
    work: DataWork,
    body: PrepareRequest,
    rows: list[FileRow],
    ids: list[str],
    caller: Principal,
) -> AsyncIterator[Prepared]:
    """Makes new files under these ids, the second for a split; a file that the caller does not keep within the block is
    deleted. The first of `rows` is the file to prepare, the others are those of `body.mix`. Raises as `check_file`."""
    paths = {row.id: str(context.files_dir / row.id) for row in rows}
    asked = {
        **body.model_dump(include={"drop", "mask", "split", "order", "seed"}),
        "mix": [[paths[one.file], one.share] for one in body.mix],
    }
    with context.quotas.receiving(caller) as took, storage.growing(context, *ids) as places:
        took(sum(row.bytes for row in rows))
        with tempfile.TemporaryDirectory(prefix="prepare-") as folder:
            more = {
                "prepare": asked,
                "target": str(places[0]),
                "validation": str(places[1]) if len(places) > 1 else None,
            }
            options = await _options(context, body, caller, Path(folder))
            lineage = await _run(work, rows[0].owner, check_request(context, rows, options, **more))
        del lineage["report"]
        lineage["id"] = ids[0]
        lineage["check"] = body.model_dump(include=set(CheckRequest.model_fields), exclude_defaults=True)
        lineage["asked"]["mix"] = [[one.file, one.share] for one in body.mix]
        for number, one in enumerate(lineage["made"]):
            one |= {"file": ids[number], "id": ids[number], "filename": _name(rows[0].filename, number)}
        new = [
            await _row(context, one, place, rows[0], lineage, caller)
            for one, place in zip(lineage["made"], places, strict=True)
        ]
        yield Prepared(lineage, new, places, caller)


async def _row(
    context: ControllerContext,
    made: dict[str, Any],
    place: Path,
    source: FileRow,
    lineage: dict[str, Any],
    caller: Principal,
) -> FileRow:
    """If somebody prepares another owner's file, that owner gets the result."""
    row = await storage.described(
        context, made["id"], place, filename=made["filename"], sha256=made["sha256"], caller=caller
    )
    key_id = caller.key_id if source.owner == caller.owner else source.key_id
    return replace(row, lineage=lineage, key_id=key_id, owner=source.owner)


def _name(filename: str, number: int) -> str:
    stem = filename.rpartition(".")[0] or filename
    return f"{stem}.prepared{'.valid' if number else ''}.jsonl"


async def _run(work: DataWork, owner: str, request: dict[str, Any]) -> dict[str, Any]:
    """Raises BadRequest, and ApiError for one too many."""
    try:
        return await work.run(owner, request)
    except BadOption as error:
        raise BadRequest(f"{error}.", code="invalid_value") from error
    except CheckFailed as error:
        raise BadRequest(f"{error}.", code="invalid_training_file") from error


async def _options(context: ControllerContext, body: CheckRequest, caller: Principal, folder: Path) -> dict[str, Any]:
    """Options of a check as its process takes them. Raises BadRequest, NotFound."""
    options: dict[str, Any] = body.model_dump(include={"max_tokens", "like", "leave_out", "method"}, exclude_none=True)
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
        options |= {"model": str(directory)}
        if "max_tokens" not in options and base.model.max_model_len:
            options["max_tokens"] = base.model.max_model_len
    if body.against is not None:
        options["against"] = str(context.files_dir / storage.known_file(context, body.against, caller, "against").id)
    if body.words is not None:
        options["words"] = str(folder / "words.txt")
        await to_thread.run_sync((folder / "words.txt").write_text, "\n".join(body.words))
    return options


async def _epoch(
    context: ControllerContext, body: CheckRequest, report: dict[str, Any], caller: Principal
) -> dict[str, Any]:
    """{"epoch"}: what an epoch over all of it costs, at the speed that such jobs had on this box."""
    if body.model is None:
        return {}
    hours, db = dict[str, float | None](), context.db
    for name, full in (("lora", False), ("full", True)):
        method = body.method or DEFAULT.name
        speeds = await asyncio.to_thread(job_records.device_speeds, db, body.model, method, full)
        hours[name] = report["tokens"]["total"] / median(speeds) / 3600 if speeds else None
    return {"epoch": {"model": body.model, "device_hours": hours}}
