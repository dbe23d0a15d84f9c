"""/v1/uploads: a large file in parts (https://platform.openai.com/docs/api-reference/uploads).

Parts may arrive concurrently and in any order; `complete` names them in file order. A part is a file that is renamed
once it is synced, so an upload continues after a restart with the parts it had; one that is sent twice is two parts.
Completing copies the parts into one file, which then behaves like one of `/v1/files`; until then the disk holds both.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from appliance.controller.access.quotas import disk_may_be_full
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import form
from appliance.controller.files import storage as files
from appliance.controller.http.resource import Resource
from appliance.controller.http.routers import FORM_BYTES, takes, unaudited
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.ids import new_id
from appliance.store.objects import files as file_rows
from appliance.store.objects import uploads as upload_rows
from appliance.store.rows import UploadRow, columns

MAX_PARTS = 10_000
_COPY_BYTES = 2**20
UPLOADS = Resource(
    "upload",
    "/v1/uploads",
    (FINE_TUNING,),
    upload_rows.find,
    missing="No such Upload object: {}",
    fields=("filename", "purpose", "bytes"),
)


class UploadCreate(StrictBody):
    bytes: Annotated[int, Field(ge=0)]
    filename: Annotated[str, StringConstraints(max_length=1024)]
    mime_type: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    purpose: files.Purpose
    expires_after: files.ExpiresAfter | None = None


class UploadComplete(StrictBody):
    part_ids: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=MAX_PARTS)]
    md5: Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{32}$")] | None = None


def routes(context: ControllerContext) -> APIRouter:
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
                filename=form.checked_filename(body.filename, "filename"),
                purpose=body.purpose,
                mime_type=body.mime_type,
                bytes=body.bytes,
                created_s=now_s,
                expires_s=now_s + config.upload_open_s,
                key_id=caller.key_id,
                owner=caller.owner,
                file_keep_s=body.expires_after.seconds if body.expires_after else None,
            )
            upload_rows.insert(db, row)
            return row

        return _view(context, UPLOADS.attempt(request, caller, await request.body()).once(make))

    @router.post("/{upload_id}/parts")
    @takes(lambda config: config.upload_part_bytes + FORM_BYTES)
    @unaudited  # upload.create and upload.complete have it
    async def add_part(upload_id: str, request: Request, caller: Caller) -> dict[str, Any]:
        row, part_id = _pending(context, upload_id, caller), new_id("part_")
        context.quotas.disk.check(int(request.headers.get("content-length", 0)))
        folder = context.uploads_dir / row.id
        folder.mkdir(mode=0o700, exist_ok=True)
        incoming = folder / f"{form.INCOMING_PREFIX}{part_id}"
        try:
            size = (await form.receive(request, incoming, config.upload_part_bytes, "data")).size
            with db.transaction():
                row = _pending(context, row.id, caller)  # it may have ended while its bytes arrived
                if (size := row.part_bytes + size) > 2 * row.bytes:
                    why = f"The parts of {row.id} would hold more than twice the {row.bytes} bytes announced"
                    raise BadRequest(f"{why}; create an upload with the file's size.", "data", "upload_too_large")
                upload_rows.update(db, row.id, part_bytes=size)
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
            upload_rows.update(db, _pending(context, upload_id, caller).id, status="cancelled")
            await to_thread.run_sync(_remove_bytes, context, upload_id)
        return _view(context, UPLOADS.known(db, upload_id, caller))

    return router


async def _complete(context: ControllerContext, row: UploadRow, body: UploadComplete, caller: Principal) -> None:
    """Make the file. Raises BadRequest, and what the disk and the quotas refuse."""
    db, file_id = context.db, new_id("file-")
    context.quotas.disk.check(row.bytes)
    with files.growing(context.files_dir, file_id) as (incoming,):
        join = partial(_join, row, context.uploads_dir / row.id, body.part_ids, incoming)
        sha256, md5 = await to_thread.run_sync(join, limiter=context.file_threads)
        if body.md5 is not None and body.md5.lower() != md5:
            why = f"The MD5 of the parts in this order is {md5}; {shown(body.md5)} was expected."
            raise BadRequest(why, "md5", "checksum_mismatch")
        # An admin may complete another owner's upload; its owner stays the same.
        by = row.owner, row.key_id
        made = files.row_of(incoming, row.filename, row.purpose, sha256, *by, row.file_keep_s, file_id)
        made = await files.described(context, incoming, made)
        with db.transaction():
            _pending(context, row.id, caller)  # still
            files.keep(context, made, incoming)
            upload_rows.update(db, row.id, status="completed", file_id=file_id)


def keep_house(context: ControllerContext, now_s: float) -> None:
    """End expired uploads, and delete the records of those that ended long ago."""
    for row in upload_rows.overdue(context.db, now_s=now_s):
        upload_rows.update(context.db, row.id, status="expired")
        _remove_bytes(context, row.id)
    before_s = now_s - context.config.idempotency_keep_s - context.config.upload_open_s
    upload_rows.delete_ended(context.db, before_s)


def _pending(context: ControllerContext, upload_id: str, caller: Principal) -> UploadRow:
    row = UPLOADS.known(context.db, upload_id, caller)
    status = "expired" if row.status == "pending" and row.expires_s <= time.time() else row.status
    if status != "pending":
        why = f"The upload {row.id} is {status}; only a pending one can be changed. Create a new one."
        raise BadRequest(why, "upload_id", "upload_not_pending")
    return row


def _join(row: UploadRow, folder: Path, part_ids: list[str], target: Path) -> tuple[str, str]:
    """SHA-256 and MD5 in hex of the parts' bytes, which are synced at `target` on return. Raises BadRequest."""
    known = {part.name: part.stat().st_size for part in folder.glob("[!.]*")} if folder.is_dir() else {}
    if unknown := [part_id for part_id in part_ids if part_id not in known]:
        raise BadRequest(f"{shown(unknown[0])} is not a part of {row.id}.", "part_ids", "part_not_found")
    if (size := sum(map(known.__getitem__, part_ids))) != row.bytes:
        why = f"The parts named hold {size} bytes together; {row.bytes} were announced."
        raise BadRequest(why, "part_ids", "upload_size_mismatch")
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with disk_may_be_full(), os.fdopen(handle, "wb", buffering=0) as out:
        for part_id in part_ids:
            with open(folder / part_id, "rb", buffering=0) as part:
                while piece := part.read(_COPY_BYTES):
                    sha256.update(piece)
                    md5.update(piece)
                    out.write(piece)
        os.fsync(out.fileno())
    return sha256.hexdigest(), md5.hexdigest()


def _remove_bytes(context: ControllerContext, upload_id: str) -> None:
    shutil.rmtree(context.uploads_dir / upload_id, ignore_errors=True)


def _view(context: ControllerContext, row: UploadRow) -> dict[str, Any]:
    made = file_rows.find(context.db, row.file_id, viewer=None) if row.file_id else None
    return {
        "id": row.id,
        "object": "upload",
        "created_at": int(row.created_s),
        "expires_at": int(row.expires_s),
        **columns(row, "bytes filename purpose status"),
        "file": files.file_object(made) if made else None,
        "owner": row.owner or None,
    }
