"""/v1/files: upload, list, retrieve, content, delete (https://platform.openai.com/docs/api-reference/files)."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import multipart
from appliance.controller.http import idempotency, views
from appliance.controller.http.paging import After, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import BadRequest, Conflict, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import batches, files
from appliance.store.rows import FileRow
from train.data.check import DataReport

ROUTE = "files"
UPLOAD_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data")
_BATCH_KEEP_S = 30 * 86400
EXPIRY_S = range(3600, 2_592_000 + 1)
_LINES_SHOWN = 20


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/files", FINE_TUNING)
    db = context.db

    @router.post("")
    async def create(request: Request, caller: Caller) -> dict[str, Any]:
        file_id = new_id("file-")
        incoming = context.files_dir / f"{multipart.INCOMING_PREFIX}{file_id}"
        with context.quotas.receiving(caller) as took:
            upload = await multipart.receive(
                request.stream(), request.headers.get("content-type", ""), incoming, context.config.upload_bytes,
                took,
            )  # fmt: skip
            try:
                purpose, keep_s = checked_purpose(upload.fields.get("purpose")), _keep_s(upload.fields)
                row = await described(
                    context, file_id, incoming, filename=upload.filename, size=upload.size, sha256=upload.sha256,
                    purpose=purpose, keep_s=keep_s, caller=caller,
                )  # fmt: skip
                attempt = idempotency.Attempt.of(
                    request, caller, ROUTE, [upload.sha256, upload.filename, row.purpose, upload.fields]
                )
                # No await between the look for an earlier attempt and the insert: two retries cannot both miss.
                with db.transaction():
                    earlier = idempotency.find(db, attempt, context.config)
                    known = files.find(db, earlier, viewer=caller.viewer, now_s=time.time()) if earlier else None
                    if known is None:
                        os.rename(incoming, context.files_dir / file_id)
                        files.insert(db, row)
                        idempotency.remember(db, attempt, file_id)
            finally:
                incoming.unlink(missing_ok=True)
        return views.file_object(known or row, caller)

    @router.get("")
    async def list_files(
        caller: Caller,
        after: After = None,
        limit: Annotated[int, Query(ge=0, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> dict[str, Any]:
        page = files.page(
            db, viewer=caller.viewer, now_s=time.time(), purpose=purpose, after=after, limit=limit,
            descending=order == "desc",
        )  # fmt: skip
        return list_object(page, lambda row: views.file_object(row, caller))

    @router.get("/{file_id}")
    async def retrieve(file_id: str, caller: Caller) -> dict[str, Any]:
        return views.file_object(known_file(context, file_id, caller), caller)

    @router.get("/{file_id}/content")
    async def content(file_id: str, caller: Caller) -> FileResponse:
        row = known_file(context, file_id, caller)
        headers = {
            # RFC 6266: the encoded form carries any name; nothing of the name is interpreted by a browser.
            "content-disposition": f"attachment; filename*=utf-8''{quote(row.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return FileResponse(context.files_dir / row.id, media_type="application/octet-stream", headers=headers)

    @router.delete("/{file_id}")
    async def delete(file_id: str, caller: Caller) -> dict[str, Any]:
        row = known_file(context, file_id, caller)
        if (batch := batches.using_file(db, row.id)) is not None:
            name = batch.id if caller.viewer in (None, batch.owner) else "an operator's batch"
            raise Conflict(f"The file {row.id} is the input of {name}, which is {batch.status}; wait for its "
                           "end or cancel it first.", param="id", code="file_in_use")  # fmt: skip
        remove(context, row)
        return {"id": row.id, "object": "file", "deleted": True}

    return router


def known_file(context: ControllerContext, file_id: str, caller: Principal, param: str = "id") -> FileRow:
    """Raises NotFound, for another's too."""
    row = files.find(context.db, file_id, viewer=caller.viewer, now_s=time.time())
    if row is None:
        raise NotFound(f"No such File object: {shown(file_id)}", param=param, code="file_not_found")
    return row


def remove(context: ControllerContext, row: FileRow) -> None:
    """The row first: bytes without a row are swept at start, a row without bytes would be a lie."""
    files.delete(context.db, row.id)
    (context.files_dir / row.id).unlink(missing_ok=True)


def sweep(context: ControllerContext) -> int:
    """Delete what a crash left behind: unfinished uploads, bytes without a row. Returns how many. Call at start."""
    known = files.ids(context.db)
    orphans = [entry for entry in context.files_dir.iterdir() if entry.name not in known]
    for entry in orphans:
        entry.unlink(missing_ok=True)
    return len(orphans)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def add_result(db: Database, files_dir: Path, filename: str, content: bytes, *, owner: str) -> str:
    """Store a file that the box itself made for somebody (purpose "fine-tune-results"); returns its id."""
    file_id = new_id("file-")
    incoming = files_dir / f"{multipart.INCOMING_PREFIX}{file_id}"
    with os.fdopen(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.rename(incoming, files_dir / file_id)
    files.insert(db, FileRow(
        id=file_id, filename=filename, purpose="fine-tune-results", bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(), status="processed", created_s=time.time(), owner=owner,
    ))  # fmt: skip
    return file_id


def checked_purpose(purpose: str | None) -> str:
    """Raises BadRequest."""
    if purpose is None:
        raise BadRequest("Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter")
    if purpose not in UPLOAD_PURPOSES:
        raise BadRequest(
            f"Invalid value for 'purpose': {shown(purpose)} was given, expected one of {', '.join(UPLOAD_PURPOSES)}.",
            param="purpose",
            code="invalid_value",
        )
    return purpose


async def described(
    context: ControllerContext, file_id: str, path: Path, *, filename: str, size: int, sha256: str, purpose: str,
    keep_s: float | None, caller: Principal,
) -> FileRow:  # fmt: skip
    """The row of the complete bytes at `path`, which are the caller's. Training data is checked line by line, on a
    thread or in a process.

    keep_s: seconds until the file is deleted; None: as its purpose has it, which is for ever but for batches' input.
    """
    now_s = time.time()
    if keep_s is None and purpose == "batch":
        keep_s = _BATCH_KEEP_S
    status, details, report = "processed", None, None
    if purpose == "fine-tune":
        found = await context.file_work.check(caller.owner, path)
        status, details, report = ("processed" if found.ok else "error"), summary(found), asdict(found)
    return FileRow(
        id=file_id, filename=filename, purpose=purpose, bytes=size, sha256=sha256, status=status,
        status_details=details, report=report, key_id=caller.key_id, owner=caller.owner, created_s=now_s,
        expires_s=None if keep_s is None else now_s + keep_s,
    )  # fmt: skip


def _keep_s(fields: dict[str, str]) -> float | None:
    """Of a form's `expires_after`; None without one. Raises BadRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest(f"Invalid value for 'expires_after.anchor': {shown(anchor)}; expected 'created_at'.",
                         param="expires_after.anchor", code="invalid_value")  # fmt: skip
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or int(seconds[:20]) not in EXPIRY_S:
        raise BadRequest(
            f"Invalid value for 'expires_after.seconds': {shown(seconds)}; expected a number from {EXPIRY_S.start} "
            f"to {EXPIRY_S.stop - 1}.",
            param="expires_after.seconds",
            code="invalid_value",
        )
    return float(seconds)


def summary(report: DataReport) -> str | None:
    """For `status_details`: the bad lines with their reasons, or what was noticed; None when there is nothing."""
    if not report.ok:
        lines = "; ".join(f"line {line}: {reason}" for line, reason in report.errors[:_LINES_SHOWN])
        more = f"; and {report.n_errors - _LINES_SHOWN} more" if report.n_errors > _LINES_SHOWN else ""
        return f"{report.n_errors} bad example(s): {lines}{more}"
    return "; ".join(report.warnings) or None
