"""/v1/uploads: a large file in parts (https://platform.openai.com/docs/api-reference/uploads).

Parts may arrive concurrently and in any order; `complete` names them in file order. Each part is synced before its row
is written, so an upload continues after a restart with the parts it had. Completing copies the parts into one file,
which then behaves like one of `/v1/files`; until then the disk holds both.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints

from appliance.controller.access.disk import insufficient_storage
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import multipart
from appliance.controller.files import storage as files
from appliance.controller.http import idempotency, views
from appliance.controller.http.routers import make_router
from appliance.controller.http.strict_body import StrictBody
from appliance.controller.interfaces.errors import BadRequest, Conflict, InvalidValue, NotFound, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal, check_stands
from appliance.store.ids import new_id
from appliance.store.objects import files as file_rows
from appliance.store.objects import uploads as upload_rows
from appliance.store.rows import UploadPartRow, UploadRow, columns

ROUTE, PARTS_ROUTE = "uploads", "uploads.parts"
MAX_PARTS = 10_000
_COPY_BYTES = 2**20
_MD5 = re.compile(r"[0-9a-fA-F]{32}\Z")


class ExpiresAfter(StrictBody):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=files.EXPIRY_S.start, lt=files.EXPIRY_S.stop)]


class UploadCreate(StrictBody):
    bytes: Annotated[int, Field(ge=0)]
    filename: Annotated[str, StringConstraints(max_length=1024)]
    mime_type: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    purpose: Annotated[str, StringConstraints(max_length=64)]
    expires_after: ExpiresAfter | None = None


class UploadComplete(StrictBody):
    part_ids: Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=MAX_PARTS)]
    md5: Annotated[str, StringConstraints(max_length=64)] | None = None


class _UnderWay:
    """What requests do to uploads at this moment."""

    def __init__(self) -> None:
        self.completing: set[str] = set()
        self.parts: Counter[str] = Counter()  # by upload: parts that arrive; even an empty one takes a row and a file
        self.arriving: Counter[str] = Counter()  # by upload: bytes of parts that are not in the store yet
        # Bytes in the store, of uploads with parts under way. Summed once, not for each chunk of 10,000 parts.
        self.settled: dict[str, int] = {}


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/uploads", FINE_TUNING)
    db, config, under_way = context.db, context.config, _UnderWay()

    @router.post("")
    async def create(body: UploadCreate, request: Request, caller: Caller) -> dict[str, Any]:
        if body.bytes > config.upload_total_bytes:
            raise BadRequest(
                f"An upload of {body.bytes} bytes is over the limit of {config.upload_total_bytes}.",
                param="bytes",
                code="upload_too_large",
            )

        def make() -> UploadRow:
            context.quotas.check_upload(caller, body.bytes)
            now_s = time.time()
            row = UploadRow(
                id=new_id("upload_"),
                filename=multipart.checked_filename(body.filename.encode(), "filename"),
                purpose=files.checked_purpose(body.purpose),
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

        attempt = idempotency.Attempt.of(request, caller, ROUTE, body.model_dump(mode="json"))
        row, _ = idempotency.once(db, config, attempt, partial(upload_rows.find, db, viewer=caller.viewer), make)
        return _view(context, row, caller)

    @router.post("/{upload_id}/parts")
    async def add_part(upload_id: str, request: Request, caller: Caller) -> dict[str, Any]:
        row = _pending(context, upload_id, caller)
        made = await _add_part(context, under_way, row, request, caller)
        return {"id": made.id, "object": "upload.part", "created_at": int(made.created_s), "upload_id": row.id}

    @router.post("/{upload_id}/complete")
    async def complete(upload_id: str, body: UploadComplete, caller: Caller) -> dict[str, Any]:
        row = _known(context, upload_id, caller)
        if row.status == "completed":
            return _view(context, row, caller)  # the SDK retries when the first answer was lost
        await _complete(context, under_way, upload_id, body, caller)
        await to_thread.run_sync(_remove_bytes, context, row.id)
        return _view(context, _known(context, upload_id, caller), caller)

    @router.post("/{upload_id}/cancel")
    async def cancel(upload_id: str, caller: Caller) -> dict[str, Any]:
        row = _known(context, upload_id, caller)
        if row.status != "cancelled":
            row = _pending(context, upload_id, caller)
            _end(context, row, "cancelled")
            await to_thread.run_sync(_remove_bytes, context, row.id)
        return _view(context, _known(context, upload_id, caller), caller)

    return router


async def _add_part(
    context: ControllerContext, under_way: _UnderWay, row: UploadRow, request: Request, caller: Principal
) -> UploadPartRow:
    """Raises BadRequest, Conflict, and what the disk and the quotas refuse."""
    db, config = context.db, context.config
    number, settled_bytes = upload_rows.stored(db, row.id)
    again = idempotency.may_come_again(request, caller, PARTS_ROUTE, db, config)
    if not again:
        _check_parts(row, number + under_way.parts[row.id])
    if row.id in under_way.completing:
        raise _busy(row)
    context.quotas.disk.check()
    mine = 0

    def took(count: int) -> None:
        nonlocal mine
        _pending(context, row.id, caller)  # of one that has ended nothing more is taken
        if under_way.settled[row.id] + under_way.arriving[row.id] + count > 2 * row.bytes:
            raise BadRequest(
                f"The parts of {row.id} would hold more than twice the {row.bytes} bytes announced (a "
                "part may be sent a second time); create an upload with the file's size.",
                param="data",
                code="upload_too_large",
            )
        context.quotas.disk.check(count)
        mine += count
        under_way.arriving[row.id] += count

    part_id = new_id("part_")
    folder = _folder(context, row.id)
    folder.mkdir(mode=0o700, exist_ok=True)
    incoming = folder / f"{multipart.INCOMING_PREFIX}{part_id}"
    under_way.parts[row.id] += 1
    under_way.settled[row.id] = settled_bytes
    try:
        part = await multipart.receive(
            request.stream(),
            request.headers.get("content-type", ""),
            incoming,
            config.upload_part_bytes,
            took,
            "data",
        )
        _pending(context, row.id, caller)  # it may have ended while its bytes arrived

        def make() -> UploadPartRow:
            if again:
                _check_parts(row, upload_rows.stored(db, row.id)[0])
            os.rename(incoming, folder / part_id)
            made = UploadPartRow(part_id, row.id, part.size, time.time())
            upload_rows.insert_part(db, made)
            under_way.settled[row.id] += part.size
            return made

        attempt = idempotency.Attempt.of(request, caller, PARTS_ROUTE, [row.id, part.sha256, part.fields])
        made, _ = idempotency.once(db, config, attempt, partial(upload_rows.find_part, db, row.id), make)
    finally:
        under_way.arriving[row.id] -= mine
        under_way.parts[row.id] -= 1
        if not under_way.parts[row.id]:
            del under_way.arriving[row.id], under_way.parts[row.id], under_way.settled[row.id]
        incoming.unlink(missing_ok=True)
    return made


async def _complete(
    context: ControllerContext, under_way: _UnderWay, upload_id: str, body: UploadComplete, caller: Principal
) -> None:
    """Make the file. Raises BadRequest, Conflict, and what the disk and the quotas refuse."""
    db = context.db
    row = _pending(context, upload_id, caller)
    _check_chosen(row, body, upload_rows.sizes(db, row.id))
    row = _pending(context, upload_id, caller)  # still
    if row.id in under_way.completing:
        raise _busy(row)
    if under_way.parts[row.id]:
        raise Conflict(
            f"{under_way.parts[row.id]} parts of the upload {row.id} are still arriving; complete it once they "
            "are answered.",
            code="upload_busy",
        )
    context.quotas.disk.check(row.bytes)
    under_way.completing.add(row.id)
    file_id = new_id("file-")
    with files.growing(context, file_id) as (incoming,):
        try:
            await _drop_all_but(context, row, set(body.part_ids))
            try:
                join = partial(_join, _folder(context, row.id), body.part_ids, incoming)
                sha256, md5 = await to_thread.run_sync(join, limiter=context.file_threads)
            except FileNotFoundError:
                _pending(context, upload_id, caller)  # it was cancelled or has expired, and its parts went
                raise
            if body.md5 is not None and body.md5.lower() != md5:
                raise BadRequest(
                    f"The MD5 of the parts in this order is {md5}; {shown(body.md5)} was expected.",
                    param="md5",
                    code="checksum_mismatch",
                )
            made = await files.described(
                context,
                file_id,
                incoming,
                filename=row.filename,
                sha256=sha256,
                caller=caller,
                purpose=row.purpose,
                keep_s=row.file_keep_s,
            )
            # An admin may complete another owner's upload; its owner stays the same.
            made = replace(made, key_id=row.key_id, owner=row.owner)
            _pending(context, upload_id, caller)
            check_stands(db, caller)
            with files.with_row(context, file_id):
                files.keep(context, made, incoming)
                upload_rows.update(db, row.id, status="completed", file_id=file_id)
        finally:
            under_way.completing.discard(row.id)


def keep_house(context: ControllerContext, now_s: float) -> None:
    """End expired uploads, and delete the records of those that ended long ago."""
    for row in upload_rows.overdue(context.db, now_s=now_s):
        _end(context, row, "expired")
        _remove_bytes(context, row.id)
    before_s = now_s - context.config.idempotency_keep_s - context.config.upload_open_s
    upload_rows.delete_ended(context.db, before_s)


def _end(context: ControllerContext, row: UploadRow, status: Literal["cancelled", "expired"]) -> None:
    upload_rows.update(context.db, row.id, status=status)


def _known(context: ControllerContext, upload_id: str, caller: Principal) -> UploadRow:
    row = upload_rows.find(context.db, upload_id, viewer=caller.viewer)
    if row is None:
        raise NotFound(f"No such Upload object: {shown(upload_id)}", param="upload_id", code="upload_not_found")
    return row


def _pending(context: ControllerContext, upload_id: str, caller: Principal) -> UploadRow:
    row = _known(context, upload_id, caller)
    status = "expired" if row.status == "pending" and row.expires_s <= time.time() else row.status
    if status != "pending":
        raise BadRequest(
            f"The upload {row.id} is {status}; only a pending one can be changed. Create a new one.",
            param="upload_id",
            code="upload_not_pending",
        )
    return row


def _check_parts(row: UploadRow, number: int) -> None:
    """One more part, when there are this many. Raises BadRequest."""
    if number >= MAX_PARTS:
        raise BadRequest(
            f"The upload {row.id} has {MAX_PARTS} parts, the most that it may; send larger ones.",
            param="data",
            code="too_many_parts",
        )


def _check_chosen(row: UploadRow, body: UploadComplete, known: dict[str, int]) -> None:
    """known: bytes of the parts that are there. Raises BadRequest."""
    if body.md5 is not None and not _MD5.match(body.md5):
        raise InvalidValue(
            f"Invalid value for 'md5': {shown(body.md5)} was given, expected 32 hexadecimal digits.", "md5"
        )
    unknown = next((part_id for part_id in body.part_ids if part_id not in known), None)
    if unknown is not None:
        raise BadRequest(f"{shown(unknown)} is not a part of {row.id}.", param="part_ids", code="part_not_found")
    if len(set(body.part_ids)) != len(body.part_ids):
        raise BadRequest("A part is named twice in 'part_ids'.", param="part_ids", code="duplicate_part")
    size = sum(known[part_id] for part_id in body.part_ids)
    if size != row.bytes:
        raise BadRequest(
            f"The parts named hold {size} bytes together; {row.bytes} were announced.",
            param="part_ids",
            code="upload_size_mismatch",
        )


async def _drop_all_but(context: ControllerContext, row: UploadRow, part_ids: set[str]) -> None:
    """Drop the parts not named: with them and the file the disk would hold three times the announced size."""
    unnamed = sorted(upload_rows.sizes(context.db, row.id).keys() - part_ids)
    await asyncio.to_thread(upload_rows.delete_parts, context.db, unnamed)
    await to_thread.run_sync(_unlink, _folder(context, row.id), unnamed)


def _unlink(folder: Path, part_ids: list[str]) -> None:
    for part_id in part_ids:
        (folder / part_id).unlink(missing_ok=True)


def _busy(row: UploadRow) -> Conflict:
    return Conflict(f"The upload {row.id} is being completed by another request.", code="upload_busy")


def _join(folder: Path, part_ids: list[str], target: Path) -> tuple[str, str]:
    """SHA-256 and MD5 in hex of the parts' bytes, which are synced at `target` on return."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    try:
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as out:
            for part_id in part_ids:
                with open(folder / part_id, "rb", buffering=0) as part:
                    while piece := part.read(_COPY_BYTES):
                        sha256.update(piece)
                        md5.update(piece)
                        out.write(piece)
            os.fsync(out.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise insufficient_storage("The disk of the box is full") from error
        raise
    return sha256.hexdigest(), md5.hexdigest()


def _folder(context: ControllerContext, upload_id: str) -> Path:
    return context.uploads_dir / upload_id


def _remove_bytes(context: ControllerContext, upload_id: str) -> None:
    shutil.rmtree(_folder(context, upload_id), ignore_errors=True)


def _view(context: ControllerContext, row: UploadRow, caller: Principal) -> dict[str, Any]:
    made = file_rows.find(context.db, row.file_id, viewer=None, now_s=time.time()) if row.file_id else None
    return {
        "id": row.id,
        "object": "upload",
        "created_at": int(row.created_s),
        "expires_at": int(row.expires_s),
        **columns(row, "bytes filename purpose status"),
        "file": views.file_object(made, caller) if made else None,
    } | views.whose(row, caller)
