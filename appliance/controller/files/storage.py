"""/v1/files and /v1/uploads (https://platform.openai.com/docs/api-reference/files): files as rows and bytes, sent at
once or in parts, or made by the box itself.

A file is complete or absent: it is written to `uploads/.incoming-…` as it arrives, synced, and moved to `files/<id>`.
The next start deletes what a crash leaves (`sweep`).

Parts of an upload may arrive concurrently and in any order, and survive a restart; one that is sent twice is two parts.
`complete` names them in file order and copies them into one file; until then the disk holds both.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote

import orjson
from anyio import to_thread
from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import Field, StringConstraints

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.forms import INCOMING_PREFIX, IncomingFile
from appliance.controller.http.resource import IDEMPOTENCY_KEEP_S, Resource, new_row, object_of, part
from appliance.controller.http.routers import FORM_BYTES, StrictBody, takes, unaudited
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store import files
from appliance.store.database import Database
from appliance.store.rows import BATCHES, UNFINISHED, FileRow, UploadRow, columns, new_id
from appliance.store.rows import UPLOADS as uploads
from train.data_checks.check import DataReport
from train.data_checks.process import check_apart
from train.data_checks.process import checked as check_here
from train.methods.method import Method
from weights.format.names import replace_file

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "vision", "user_data"]
_BATCH_KEEP_S = 30 * 86400
_CAUSES_SHOWN = 3
APART_FROM_BYTES = 1 << 20
"""Checking a smaller file takes less time than starting a process."""
MAX_FILENAME_BYTES = 255
MAX_PARTS = 10_000
_COPY_BYTES = 2**20

_AUDITED = ("filename", "purpose", "bytes")
FILES = Resource(
    "file", "/v1/files", (FINE_TUNING,), files.find, missing="No such File object: {}", param="id", fields=_AUDITED
)
UPLOADS = Resource(
    "upload", "/v1/uploads", (FINE_TUNING,), uploads.find_visible, missing="No such Upload object: {}", fields=_AUDITED
)


Anchor = Literal["created_at"]
KeepSeconds = Annotated[int, Field(ge=3600, le=2_592_000)]


class ExpiresAfter(StrictBody):
    anchor: Anchor
    seconds: KeepSeconds


def remove(context: ControllerContext, row: FileRow) -> None:
    """Delete the row and its bytes. The commit comes last: after a crash before it, the row can be deleted again."""
    with context.db.transaction():
        files.delete(context.db, row.id)
        (context.files_dir / row.id).unlink(missing_ok=True)


def sweep(context: ControllerContext) -> None:
    """Delete half-written files, and bytes of uploads and batches that have ended; call it at start. Other bytes
    without a row stay: the database that has their rows may be restored."""
    name = f"{INCOMING_PREFIX}*"
    for half in (*context.uploads_dir.rglob(name), *context.files_dir.glob(name)):
        half.unlink()
    for folder in list(context.uploads_dir.iterdir()):
        upload = uploads.find(context.db, folder.name)
        if upload is not None and upload.status != "pending":
            shutil.rmtree(folder)
    for answers in list(context.batches_dir.iterdir()):
        batch = BATCHES.find(context.db, answers.name.partition(".")[0])
        if batch is not None and batch.finished:
            answers.unlink()


@contextlib.contextmanager
def growing(files_dir: Path, *file_ids: str) -> Iterator[list[Path]]:
    """Yield paths for the bytes of new files with these ids. Bytes without a row are deleted at the end of the block:
    those that `keep` did not move, and after an error all of them."""
    paths = [files_dir / f"{INCOMING_PREFIX}{file_id}" for file_id in file_ids]
    try:
        yield paths
    except BaseException:
        for file_id in file_ids:
            (files_dir / file_id).unlink(missing_ok=True)
        raise
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def keep(context: ControllerContext, row: FileRow, path: Path) -> None:
    """Move the bytes of a new file in place, and write its row. Call in a transaction, within `growing`."""
    os.rename(path, context.files_dir / row.id)
    files.insert(context.db, row)


def row_of(
    path: Path,
    filename: str,
    purpose: str,
    sha256: str,
    owner: str,
    key_id: str | None = None,
    keep_s: float | None = None,
    file_id: str = "",
) -> FileRow:
    """Return the row of a new file with the complete bytes at `path`. keep_s: seconds until it is deleted; None:
    never."""
    now_s, size = time.time(), path.stat().st_size
    more: Any = {"owner": owner, "key_id": key_id, "expires_s": None if keep_s is None else now_s + keep_s}
    return FileRow(file_id or new_id("file-"), filename, purpose, size, sha256, "processed", now_s, **more)


def make_result(db: Database, files_dir: Path, content: bytes, filename: str, owner: str) -> str:
    """Write and sync a file of the box's own for an owner (purpose "fine-tune-results"), with its row; returns its id.
    Raises OSError where the disk is full."""
    file_id, sha256 = new_id("file-"), hashlib.sha256(content).hexdigest()
    with growing(files_dir, file_id) as (incoming,):
        replace_file(incoming, content, durable=True)
        with db.transaction():
            files.insert(db, row_of(incoming, filename, "fine-tune-results", sha256, owner, file_id=file_id))
            os.rename(incoming, files_dir / file_id)
    return file_id


def digest_of(path: Path, name: str = "sha256") -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, name).hexdigest()


async def checked(
    context: ControllerContext,
    path: Path,
    chat_path: Path | None = None,
    method: Method | None = None,
    tokenizer: Path | None = None,
    cut_at: int | None = None,
) -> DataReport:
    """Check a training file, in a process of its own if it is large or its tokens are counted. A file in a format that
    the method does not take has an error in its first line. Raises OSError.

    Args:
        chat_path: where to write it in the method's format.
        method: of the job that names it; None before one does.
        tokenizer: the directory of a model whose tokens are counted.
        cut_at: the number of tokens within which the method must have something left of an example.
    """
    name = method.name if method else None
    options = {"chat_path": chat_path, "method": name, "tokenizer": tokenizer, "cut_at": cut_at}
    if tokenizer is None and path.stat().st_size < APART_FROM_BYTES:
        return await to_thread.run_sync(partial(check_here, path, **options), limiter=context.file_threads)
    async with context.file_threads:
        return await check_apart(path, **options)


async def described(context: ControllerContext, path: Path, row: FileRow) -> FileRow:
    """Return the row of a complete upload at `path`. Training data is checked line by line, on a thread or in a
    process."""
    if row.purpose == "batch" and row.expires_s is None:
        return replace(row, expires_s=row.created_s + _BATCH_KEEP_S)
    if row.purpose != "fine-tune":
        return row
    report = await checked(context, path)
    # Omits the tokens of each example, which a job counts with its model's tokenizer.
    stored = asdict(replace(report, example_tokens=[]))
    del stored["example_tokens"]
    return replace(
        row,
        status="processed" if report.ok else "error",
        status_details=summary(report, f"appliance file get {row.id} --errors"),
        report=stored,
    )


def summary(report: DataReport, command: str = "") -> str | None:
    """For `status_details`: the first bad lines with their reasons, or the warnings and notes; None if there are none.
    command: lists all of them."""
    if not report.ok:
        # Lines with the same cause are reported once, with the first line.
        first = {reason: line for line, reason in reversed(report.errors)}
        shown = sorted(first, key=first.__getitem__)[:_CAUSES_SHOWN]
        lines = "; ".join(f"line {first[reason]}: {reason}" for reason in shown)
        where = f"; `{command}` lists all of them" if command and report.n_errors > len(shown) else ""
        return f"{report.n_errors} bad example(s): {lines}{where}"
    return "; ".join([*report.warnings, *report.notes]) or None


def file_object(row: FileRow) -> dict[str, Any]:
    return object_of(row, "file", "bytes filename purpose status status_details")


# --- the routes of files


def file_routes(context: ControllerContext) -> APIRouter:
    def filters(purpose: Annotated[str | None, Query(max_length=64)] = None) -> dict[str, Any]:
        return {"purpose": purpose}

    router, db = FILES.serve(context, file_object, files.page, part(10_000), filters), context.db

    @router.post("")
    @takes(lambda config: config.upload_bytes + FORM_BYTES)
    async def create(
        request: Request,
        caller: Caller,
        file: UploadFile,
        purpose: Annotated[Purpose, Form()],
        anchor: Annotated[Anchor | None, Form(alias="expires_after[anchor]")] = None,
        keep_s: Annotated[KeepSeconds | None, Form(alias="expires_after[seconds]")] = None,
    ) -> dict[str, Any]:
        filename, file_id = checked_filename(file.filename or "", "file"), new_id("file-")
        if (anchor is None) is not (keep_s is None):
            raise InvalidValue("expires_after has an anchor and seconds, or neither.", "expires_after")
        with growing(context.files_dir, file_id) as (incoming,):
            content = cast(IncomingFile, file.file)
            await to_thread.run_sync(content.move, incoming)
            by, sha256 = (caller.owner, caller.key_id), content.sha256.hexdigest()
            arrived = row_of(incoming, filename, purpose, sha256, *by, keep_s, file_id)
            row = await described(context, incoming, arrived)

            def make() -> FileRow:
                context.quotas.check(caller, row.bytes)
                keep(context, row, incoming)
                return row

            identity = orjson.dumps([sha256, filename, purpose, keep_s])
            return file_object(FILES.once(request, caller, identity, make))

    @router.get("/{file_id}/content")
    def content(file_id: str, caller: Caller) -> FileResponse:
        row = FILES.known(db, file_id, caller)
        headers = {
            # RFC 6266: the encoded form carries any name, and a browser interprets no part of it.
            "content-disposition": f"attachment; filename*=utf-8''{quote(row.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return FileResponse(context.files_dir / row.id, media_type="application/octet-stream", headers=headers)

    @router.get("/{file_id}/errors")
    def errors(file_id: str, caller: Caller) -> dict[str, Any]:
        """List the first hundred bad examples from the check at upload, by line. total: number of all."""
        report = FILES.known(db, file_id, caller).report or {}
        total, bad = report.get("n_errors", 0), report.get("errors", [])
        data = [{"object": "file.error", "line": line, "reason": reason} for line, reason in bad]
        return {"object": "list", "data": data, "total": total, "has_more": len(data) < total}

    @router.delete("/{file_id}")
    async def delete(file_id: str, caller: Caller) -> dict[str, Any]:
        row = FILES.known(db, file_id, caller)
        if (batch := BATCHES.first(db, f"input_file_id = ? AND {UNFINISHED['batches']}", row.id)) is not None:
            name = batch.id if caller.viewer in (None, batch.owner) else "an operator's batch"
            why = f"The file {row.id} is the input of {name}, which is {batch.status}"
            raise Conflict(f"{why}; wait for its end or cancel it first.", "id", "file_in_use")
        remove(context, row)
        return {"id": row.id, "object": "file", "deleted": True}

    return router


def checked_filename(name: str, param: str = "file") -> str:
    """Check a filename, which is only displayed: names that look like a path are rejected. Raises BadRequest."""
    too_long = len(name.encode("utf-8", "replace")) > MAX_FILENAME_BYTES
    if name in ("", ".", "..") or too_long or "/" in name or "\\" in name or not name.isprintable():
        rule = f"a bare name of 1 to {MAX_FILENAME_BYTES} printable bytes"
        raise BadRequest(f"The filename is {shown(name, 60)}; expected {rule}.", param, "invalid_filename")
    return name


# --- uploads in parts


class UploadCreate(StrictBody):
    bytes: Annotated[int, Field(ge=0)]
    filename: Annotated[str, StringConstraints(max_length=1024)]
    mime_type: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class UploadComplete(StrictBody):
    part_ids: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=MAX_PARTS)]
    md5: Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{32}$")] | None = None


def upload_routes(context: ControllerContext) -> APIRouter:
    router, db, config = UPLOADS.router(), context.db, context.config

    @router.post("")
    async def create(body: UploadCreate, request: Request, caller: Caller) -> dict[str, Any]:
        if body.bytes > config.upload_total_bytes:
            why = f"An upload of {body.bytes} bytes is over the limit of {config.upload_total_bytes}."
            raise BadRequest(why, "bytes", "upload_too_large")

        def make() -> UploadRow:
            context.quotas.check(caller, 2 * body.bytes, begins=True)  # twice the size: its parts, and the file
            now_s = time.time()
            row = new_row(
                UploadRow,
                "upload_",
                caller,
                filename=checked_filename(body.filename, "filename"),
                **columns(body, "purpose mime_type bytes"),
                created_s=now_s,
                expires_s=now_s + config.upload_open_s,
                file_keep_s=body.expires_after.seconds if body.expires_after else None,
            )
            return uploads.insert(db, row)

        return _view(context, UPLOADS.once(request, caller, await request.body(), make))

    @router.post("/{upload_id}/parts")
    @takes(lambda config: config.upload_part_bytes + FORM_BYTES)
    @unaudited  # upload.create and upload.complete have it
    async def add_part(upload_id: str, data: UploadFile, caller: Caller) -> dict[str, Any]:
        row, part_id = _pending(context, upload_id, caller), new_id("part_")
        incoming = context.uploads_dir / row.id / f"{INCOMING_PREFIX}{part_id}"
        incoming.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            await to_thread.run_sync(cast(IncomingFile, data.file).move, incoming)
            size = incoming.stat().st_size
            with db.transaction():
                row = _pending(context, row.id, caller)  # the upload may have ended while its bytes arrived
                if (size := row.part_bytes + size) > 2 * row.bytes:
                    why = f"The parts of {row.id} would hold more than twice the {row.bytes} bytes announced"
                    raise BadRequest(f"{why}; create an upload with the file's size.", "data", "upload_too_large")
                uploads.update(db, row.id, part_bytes=size)
                os.rename(incoming, incoming.with_name(part_id))
        finally:
            incoming.unlink(missing_ok=True)
        return {"id": part_id, "object": "upload.part", "created_at": int(time.time()), "upload_id": upload_id}

    @router.post("/{upload_id}/complete")
    async def complete(upload_id: str, body: UploadComplete, caller: Caller) -> dict[str, Any]:
        if UPLOADS.known(db, upload_id, caller).status != "completed":  # the SDK retries when the first answer was lost
            await _complete(context, _pending(context, upload_id, caller), body, caller)
            await to_thread.run_sync(partial(shutil.rmtree, context.uploads_dir / upload_id, ignore_errors=True))
        return _view(context, UPLOADS.known(db, upload_id, caller))

    @router.post("/{upload_id}/cancel")
    async def cancel(upload_id: str, caller: Caller) -> dict[str, Any]:
        if UPLOADS.known(db, upload_id, caller).status != "cancelled":
            uploads.update(db, _pending(context, upload_id, caller).id, status="cancelled")
            await to_thread.run_sync(partial(shutil.rmtree, context.uploads_dir / upload_id, ignore_errors=True))
        return _view(context, UPLOADS.known(db, upload_id, caller))

    return router


async def _complete(context: ControllerContext, row: UploadRow, body: UploadComplete, caller: Principal) -> None:
    """Make the file. Raises BadRequest, and what the disk and the quotas refuse."""
    db, file_id = context.db, new_id("file-")
    context.quotas.disk.check(row.bytes)
    with growing(context.files_dir, file_id) as (incoming,):
        join = partial(_join, row, context.uploads_dir / row.id, body.part_ids, incoming)
        try:
            sha256 = await to_thread.run_sync(join, limiter=context.file_threads)
        except FileNotFoundError:
            _pending(context, row.id, caller)  # the upload has ended meanwhile, and its parts were deleted
            raise
        digest = partial(digest_of, incoming, "md5")
        if body.md5 and body.md5.lower() != (md5 := await to_thread.run_sync(digest, limiter=context.file_threads)):
            why = f"The MD5 of the parts in this order is {md5}; {shown(body.md5)} was expected."
            raise BadRequest(why, "md5", "checksum_mismatch")
        # An admin may complete another owner's upload; its owner stays the same.
        by = row.owner, row.key_id
        file = row_of(incoming, row.filename, row.purpose, sha256, *by, row.file_keep_s, file_id)
        file = await described(context, incoming, file)
        with db.transaction():
            _pending(context, row.id, caller)  # still
            keep(context, file, incoming)
            uploads.update(db, row.id, status="completed", file_id=file_id)


def end_uploads(context: ControllerContext, now_s: float) -> None:
    """End expired uploads, and delete the records of those that ended long ago."""
    for row in uploads.list_all(context.db, "status = 'pending' AND expires_s <= ?", now_s):
        uploads.update(context.db, row.id, status="expired")
        shutil.rmtree(context.uploads_dir / row.id, ignore_errors=True)
    before_s = now_s - IDEMPOTENCY_KEEP_S - context.config.upload_open_s
    context.db.delete("uploads", "status != 'pending' AND created_s < ?", [before_s])


def _pending(context: ControllerContext, upload_id: str, caller: Principal) -> UploadRow:
    row = UPLOADS.known(context.db, upload_id, caller)
    status = "expired" if row.status == "pending" and row.expires_s <= time.time() else row.status
    if status != "pending":
        why = f"The upload {row.id} is {status}; only a pending one can be changed. Create a new one."
        raise BadRequest(why, "upload_id", "upload_not_pending")
    return row


def _join(row: UploadRow, folder: Path, part_ids: list[str], target: Path) -> str:
    """Join the parts in a new file, synced on return; return its SHA-256 in hex. Raises BadRequest."""
    sizes = {part.name: part.stat().st_size for part in folder.glob("[!.]*")} if folder.is_dir() else {}
    if unknown := [part_id for part_id in part_ids if part_id not in sizes]:
        raise BadRequest(f"{shown(unknown[0])} is not a part of {row.id}.", "part_ids", "part_not_found")
    if (size := sum(map(sizes.__getitem__, part_ids))) != row.bytes:
        why = f"The parts named hold {size} bytes together; {row.bytes} were announced."
        raise BadRequest(why, "part_ids", "upload_size_mismatch")

    with IncomingFile(folder.parent) as out:
        for part_id in part_ids:
            with open(folder / part_id, "rb") as part:
                shutil.copyfileobj(part, out, _COPY_BYTES)
        out.move(target)
        return out.sha256.hexdigest()


def _view(context: ControllerContext, row: UploadRow) -> dict[str, Any]:
    file = files.find(context.db, row.file_id, viewer=None) if row.file_id else None
    view = file_object(file) if file else None
    return object_of(row, "upload", "bytes filename purpose status", file=view)
