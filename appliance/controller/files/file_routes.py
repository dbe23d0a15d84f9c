"""/v1/files and /v1/uploads: upload, list, retrieve, content, delete
(https://platform.openai.com/docs/api-reference/files); and a large file in parts (…/uploads).

A file is complete or absent. Starlette spools a form's file to a nameless one on the box's disk; from there it is
copied to `files/.incoming-<id>`, synced, and only then renamed to `files/<id>`; the next start deletes what a crash
leaves (`storage.sweep`).

Parts of an upload may arrive concurrently and in any order; `complete` names them in file order. A part is a file that
is renamed once it is synced, so an upload continues after a restart with the parts it had; one that is sent twice is
two parts. Completing copies the parts into one file; until then the disk holds both.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

import orjson
from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from appliance.controller.access.limits import disk_may_be_full
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.files.storage import FILES, INCOMING_PREFIX
from appliance.controller.http.resource import IDEMPOTENCY_KEEP_S, Resource, is_retry, object_of, part
from appliance.controller.http.routers import FORM_BYTES, StrictBody, takes, unaudited
from appliance.controller.interfaces.errors import BadRequest, Conflict, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.ids import new_id
from appliance.store.objects import files
from appliance.store.rows import BATCHES, UNFINISHED, FileRow, UploadRow
from appliance.store.rows import UPLOADS as uploads

MAX_FILENAME_BYTES = 255
_MAX_FIELDS = 16
_FIELD_BYTES = 1024
MAX_PARTS = 10_000
_COPY_BYTES = 2**20
UPLOADS = Resource(
    "upload",
    "/v1/uploads",
    (FINE_TUNING,),
    uploads.find_visible,
    missing="No such Upload object: {}",
    fields=("filename", "purpose", "bytes"),
)


class _Form(BaseModel):
    """The text fields of a form with a file."""

    purpose: storage.Purpose
    expires_after: storage.ExpiresAfter | None = None


def _filters(purpose: Annotated[str | None, Query(max_length=64)] = None) -> dict[str, Any]:
    return {"purpose": purpose}


def file_routes(context: ControllerContext) -> APIRouter:
    router, db = FILES.serve(context, storage.file_object, files.page, part(10_000), _filters), context.db

    @router.post("")
    @takes(lambda config: config.upload_bytes + FORM_BYTES)
    async def create(request: Request, caller: Caller) -> dict[str, Any]:
        return storage.file_object(await _received(context, request, caller))

    @router.get("/{file_id}/content")
    def content(file_id: str, caller: Caller) -> FileResponse:
        row = FILES.known(db, file_id, caller)
        headers = {
            # RFC 6266: the encoded form carries any name; nothing of the name is interpreted by a browser.
            "content-disposition": f"attachment; filename*=utf-8''{quote(row.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return FileResponse(context.files_dir / row.id, media_type="application/octet-stream", headers=headers)

    @router.get("/{file_id}/errors")
    def errors(file_id: str, caller: Caller) -> dict[str, Any]:
        """What the check at upload found: the first hundred bad examples, by line."""
        report = FILES.known(db, file_id, caller).report or {}
        return storage.errors_object(report.get("errors", []), report.get("n_errors", 0))

    @router.delete("/{file_id}")
    async def delete(file_id: str, caller: Caller) -> dict[str, Any]:
        row = FILES.known(db, file_id, caller)
        if (batch := BATCHES.first(db, f"input_file_id = ? AND {UNFINISHED['batches']}", row.id)) is not None:
            name = batch.id if caller.viewer in (None, batch.owner) else "an operator's batch"
            why = f"The file {row.id} is the input of {name}, which is {batch.status}"
            raise Conflict(f"{why}; wait for its end or cancel it first.", "id", "file_in_use")
        storage.remove(context, row)
        return {"id": row.id, "object": "file", "deleted": True}

    return router


async def _received(context: ControllerContext, request: Request, caller: Principal) -> FileRow:
    """The file of an upload, or the one that an earlier attempt made. Raises BadRequest, and what disk and quotas
    refuse."""
    file_id, announced = new_id("file-"), max(0, int(request.headers.get("content-length", 0)) - FORM_BYTES)
    context.quotas.disk.check(announced)
    if not (is_retry(request) or "idempotency-key" in request.headers):
        context.quotas.check(caller, announced)  # before all of it has arrived
    with storage.growing(context.files_dir, file_id) as (incoming,):
        upload = await receive(request, incoming)
        fields = _form_of(upload.fields)
        keep_s, by = fields.expires_after.seconds if fields.expires_after else None, (caller.owner, caller.key_id)
        arrived = storage.row_of(incoming, upload.filename, fields.purpose, upload.sha256, *by, keep_s, file_id)
        row = await storage.described(context, incoming, arrived)

        def make() -> FileRow:
            context.quotas.check(caller, row.bytes)
            storage.keep(context, row, incoming)
            return row

        identity = orjson.dumps([upload.sha256, upload.filename, upload.fields], option=orjson.OPT_SORT_KEYS)
        return FILES.once(request, caller, identity, make)


def _form_of(fields: dict[str, str]) -> _Form:
    """Raises RequestValidationError."""
    names = {name: f"expires_after[{name}]" for name in storage.ExpiresAfter.model_fields}
    expiry = {name: fields[field] for name, field in names.items() if field in fields}
    body: dict[str, Any] = {"purpose": fields["purpose"]} if "purpose" in fields else {}
    body |= {"expires_after": expiry} if expiry else {}
    try:
        return _Form.model_validate_strings(body)
    except ValidationError as error:
        errors = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise RequestValidationError(errors, body=body) from error


# --- a form whose file goes to disk


@dataclass
class Upload:
    """fields: the form's text fields by name. filename: as sent, checked. sha256 in hex."""

    filename: str
    sha256: str
    fields: dict[str, str]


async def receive(request: Request, target: Path, part: str = "file") -> Upload:
    """Read a form whose one file is in the part named `part` into `target`, complete and synced on return.

    The caller renames it, or deletes it on any error. Raises BadRequest, and ApiError 507 where the disk is full.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("multipart/form-data"):
        why = f"Files are uploaded as multipart/form-data; the content-type {shown(content_type)} was given."
        raise BadRequest(why, code="invalid_content_type")
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_FIELD_BYTES
    )
    try:
        with disk_may_be_full():
            form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"The multipart body is malformed: {error.message}", code="invalid_multipart") from error
    file = form.get(part)
    if not isinstance(file, UploadFile):
        raise BadRequest(f"Missing required parameter: '{part}'.", part, "missing_required_parameter")
    filename = checked_filename(file.filename or "", part)
    sha256, _ = await to_thread.run_sync(_copied, [file.file], target)
    await form.close()
    return Upload(filename, sha256, {name: text for name, text in form.multi_items() if isinstance(text, str)})


def _copied(sources: Iterable[BinaryIO], target: Path) -> tuple[str, str]:
    """Write the sources one after the other to a new file, synced on return. Returns its SHA-256 and MD5 in hex."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with disk_may_be_full(), os.fdopen(handle, "wb", buffering=0) as out:
        for source in sources:
            while piece := source.read(_COPY_BYTES):
                sha256.update(piece)
                md5.update(piece)
                out.write(piece)
        os.fsync(out.fileno())
    return sha256.hexdigest(), md5.hexdigest()


def checked_filename(name: str, param: str = "file") -> str:
    """The name is shown and sent back, never used as a path; names that look like a path are still rejected."""
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
    purpose: storage.Purpose
    expires_after: storage.ExpiresAfter | None = None


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
            context.quotas.check(caller, 2 * body.bytes, begins=True)  # its parts, and the file
            now_s = time.time()
            row = UploadRow(
                id=new_id("upload_"),
                filename=checked_filename(body.filename, "filename"),
                purpose=body.purpose,
                mime_type=body.mime_type,
                bytes=body.bytes,
                created_s=now_s,
                expires_s=now_s + config.upload_open_s,
                key_id=caller.key_id,
                owner=caller.owner,
                file_keep_s=body.expires_after.seconds if body.expires_after else None,
            )
            uploads.insert(db, row)
            return row

        return _view(context, UPLOADS.once(request, caller, await request.body(), make))

    @router.post("/{upload_id}/parts")
    @takes(lambda config: config.upload_part_bytes + FORM_BYTES)
    @unaudited  # upload.create and upload.complete have it
    async def add_part(upload_id: str, request: Request, caller: Caller) -> dict[str, Any]:
        row, part_id = _pending(context, upload_id, caller), new_id("part_")
        context.quotas.disk.check(int(request.headers.get("content-length", 0)))
        folder = context.uploads_dir / row.id
        folder.mkdir(mode=0o700, exist_ok=True)
        incoming = folder / f"{INCOMING_PREFIX}{part_id}"
        try:
            await receive(request, incoming, "data")
            size = incoming.stat().st_size
            with db.transaction():
                row = _pending(context, row.id, caller)  # it may have ended while its bytes arrived
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
            await to_thread.run_sync(_remove_bytes, context, upload_id)
        return _view(context, UPLOADS.known(db, upload_id, caller))

    @router.post("/{upload_id}/cancel")
    async def cancel(upload_id: str, caller: Caller) -> dict[str, Any]:
        if UPLOADS.known(db, upload_id, caller).status != "cancelled":
            uploads.update(db, _pending(context, upload_id, caller).id, status="cancelled")
            await to_thread.run_sync(_remove_bytes, context, upload_id)
        return _view(context, UPLOADS.known(db, upload_id, caller))

    return router


async def _complete(context: ControllerContext, row: UploadRow, body: UploadComplete, caller: Principal) -> None:
    """Make the file. Raises BadRequest, and what the disk and the quotas refuse."""
    db, file_id = context.db, new_id("file-")
    context.quotas.disk.check(row.bytes)
    with storage.growing(context.files_dir, file_id) as (incoming,):
        join = partial(_join, row, context.uploads_dir / row.id, body.part_ids, incoming)
        try:
            sha256, md5 = await to_thread.run_sync(join, limiter=context.file_threads)
        except FileNotFoundError:
            _pending(context, row.id, caller)  # it has ended meanwhile, and its parts went
            raise
        if body.md5 is not None and body.md5.lower() != md5:
            why = f"The MD5 of the parts in this order is {md5}; {shown(body.md5)} was expected."
            raise BadRequest(why, "md5", "checksum_mismatch")
        # An admin may complete another owner's upload; its owner stays the same.
        by = row.owner, row.key_id
        file = storage.row_of(incoming, row.filename, row.purpose, sha256, *by, row.file_keep_s, file_id)
        file = await storage.described(context, incoming, file)
        with db.transaction():
            _pending(context, row.id, caller)  # still
            storage.keep(context, file, incoming)
            uploads.update(db, row.id, status="completed", file_id=file_id)


def end_uploads(context: ControllerContext, now_s: float) -> None:
    """End expired uploads, and delete the records of those that ended long ago."""
    for row in uploads.list_all(context.db, "status = 'pending' AND expires_s <= ?", now_s):
        uploads.update(context.db, row.id, status="expired")
        _remove_bytes(context, row.id)
    before_s = now_s - IDEMPOTENCY_KEEP_S - context.config.upload_open_s
    context.db.delete("uploads", "status != 'pending' AND created_s < ?", [before_s])


def _pending(context: ControllerContext, upload_id: str, caller: Principal) -> UploadRow:
    row = UPLOADS.known(context.db, upload_id, caller)
    status = "expired" if row.status == "pending" and row.expires_s <= time.time() else row.status
    if status != "pending":
        why = f"The upload {row.id} is {status}; only a pending one can be changed. Create a new one."
        raise BadRequest(why, "upload_id", "upload_not_pending")
    return row


def _join(row: UploadRow, folder: Path, part_ids: list[str], target: Path) -> tuple[str, str]:
    """Join the parts at `target`, as `_copied`. Raises BadRequest."""
    sizes = {part.name: part.stat().st_size for part in folder.glob("[!.]*")} if folder.is_dir() else {}
    if unknown := [part_id for part_id in part_ids if part_id not in sizes]:
        raise BadRequest(f"{shown(unknown[0])} is not a part of {row.id}.", "part_ids", "part_not_found")
    if (size := sum(map(sizes.__getitem__, part_ids))) != row.bytes:
        why = f"The parts named hold {size} bytes together; {row.bytes} were announced."
        raise BadRequest(why, "part_ids", "upload_size_mismatch")

    def parts() -> Iterator[BinaryIO]:
        for part_id in part_ids:
            with open(folder / part_id, "rb") as part:  # one at a time: there may be 10,000
                yield part

    return _copied(parts(), target)


def _remove_bytes(context: ControllerContext, upload_id: str) -> None:
    shutil.rmtree(context.uploads_dir / upload_id, ignore_errors=True)


def _view(context: ControllerContext, row: UploadRow) -> dict[str, Any]:
    file = files.find(context.db, row.file_id, viewer=None) if row.file_id else None
    view = storage.file_object(file) if file else None
    return object_of(row, "upload", "bytes filename purpose status", file=view)
