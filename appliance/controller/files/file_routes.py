"""/v1/files: upload, list, retrieve, content, delete (https://platform.openai.com/docs/api-reference/files)."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import multipart, storage
from appliance.controller.http import idempotency, views
from appliance.controller.http.paging import After, Order, WholeLimit, list_object
from appliance.controller.http.routers import make_router
from appliance.controller.interfaces.errors import Conflict, InvalidValue, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.store.ids import new_id
from appliance.store.objects import batches, files
from appliance.store.rows import FileRow

ROUTE = "files"

_SECONDS_DIGITS = 20


def routes(context: ControllerContext) -> APIRouter:
    router = make_router("/v1/files", FINE_TUNING)
    db = context.db

    @router.post("")
    async def create(request: Request, caller: Caller) -> dict[str, Any]:
        return views.file_object(await _received(context, request, caller), caller)

    @router.get("")
    def list_files(
        caller: Caller,
        after: After = None,
        limit: WholeLimit = 10_000,
        order: Order = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> dict[str, Any]:
        page = files.page(
            db,
            viewer=caller.viewer,
            now_s=time.time(),
            purpose=purpose,
            after=after,
            limit=limit,
            descending=order == "desc",
        )
        return list_object(page, lambda row: views.file_object(row, caller))

    @router.get("/{file_id}")
    def retrieve(file_id: str, caller: Caller) -> dict[str, Any]:
        return views.file_object(storage.known_file(context, file_id, caller), caller)

    @router.get("/{file_id}/content")
    def content(file_id: str, caller: Caller) -> FileResponse:
        row = storage.known_file(context, file_id, caller)
        headers = {
            # RFC 6266: the encoded form carries any name; nothing of the name is interpreted by a browser.
            "content-disposition": f"attachment; filename*=utf-8''{quote(row.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return _Content(context, row, caller, headers)

    @router.get("/{file_id}/errors")
    def errors(file_id: str, caller: Caller) -> dict[str, Any]:
        """What the check at upload found: the first hundred bad examples, by line."""
        report = storage.known_file(context, file_id, caller).report or {}
        return storage.errors_object(report.get("errors", []), report.get("n_errors", 0))

    @router.delete("/{file_id}")
    async def delete(file_id: str, caller: Caller) -> dict[str, Any]:
        row = storage.known_file(context, file_id, caller)
        if (batch := batches.using_file(db, row.id)) is not None:
            name = batch.id if caller.viewer in (None, batch.owner) else "an operator's batch"
            raise Conflict(
                f"The file {row.id} is the input of {name}, which is {batch.status}; wait for its "
                "end or cancel it first.",
                param="id",
                code="file_in_use",
            )
        storage.remove(context, row)
        return {"id": row.id, "object": "file", "deleted": True}

    return router


async def _received(context: ControllerContext, request: Request, caller: Principal) -> FileRow:
    """The file of an upload, or the one that an earlier attempt made. Raises BadRequest, and what disk and quotas
    refuse."""
    file_id = new_id("file-")
    again = idempotency.may_come_again(request, caller, ROUTE, context.db, context.config)
    with context.quotas.receiving(caller, again=again) as took, storage.growing(context, file_id) as (incoming,):
        upload = await multipart.receive(
            request.stream(),
            request.headers.get("content-type", ""),
            incoming,
            context.config.upload_bytes,
            took,
        )
        purpose, keep_s = storage.checked_purpose(upload.fields.get("purpose")), _keep_s(upload.fields)
        row = await storage.described(
            context,
            file_id,
            incoming,
            filename=upload.filename,
            sha256=upload.sha256,
            caller=caller,
            purpose=purpose,
            keep_s=keep_s,
        )
        attempt = idempotency.Attempt.of(
            request, caller, ROUTE, [upload.sha256, upload.filename, row.purpose, upload.fields]
        )

        def make() -> FileRow:
            if again:
                context.quotas.check_arrived(caller)
            storage.keep(context, row, incoming)
            return row

        with storage.with_row(context, file_id):
            known = partial(files.find, context.db, viewer=caller.viewer, now_s=time.time())
            kept, _ = idempotency.once(context.db, context.config, attempt, known, make)
    return kept


class _Content(FileResponse):
    """The bytes of a file: one of the reader's downloads. If several ranges are asked for, all of it is sent, as a
    server may (RFC 9110, 14.2): each costs a thread."""

    def __init__(self, context: ControllerContext, row: FileRow, caller: Principal, headers: dict[str, str]):
        super().__init__(context.files_dir / row.id, media_type="application/octet-stream", headers=headers)
        self._quotas, self._row, self._caller = context.quotas, row, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"range" or b"," not in value]
        scope = {**scope, "headers": headers}
        with self._quotas.reading(self._caller):
            try:
                # Opened once, and sent from there: it may be deleted after its row was read, and after its length was.
                opened = await to_thread.run_sync(os.open, self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise storage.no_such_file(self._row.id) from None
            try:
                self.path = f"/proc/self/fd/{opened}"
                await super().__call__(scope, receive, send)
            finally:
                os.close(opened)


def _keep_s(fields: dict[str, str]) -> float | None:
    """Seconds from a form's `expires_after`; None without one. Raises BadRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidValue(
            f"Invalid value for 'expires_after.anchor': {shown(anchor)}; expected 'created_at'.", "expires_after.anchor"
        )
    # What is checked is what is returned: of a number of 400 digits the first 20 once passed, and the file never ended.
    short = seconds is not None and len(seconds) <= _SECONDS_DIGITS and seconds.isascii() and seconds.isdigit()
    kept_s = int(seconds) if seconds is not None and short else -1
    if kept_s not in storage.EXPIRY_S:
        raise InvalidValue(
            f"Invalid value for 'expires_after.seconds': {shown(seconds)}; expected a number from "
            f"{storage.EXPIRY_S.start} to {storage.EXPIRY_S.stop - 1}.",
            "expires_after.seconds",
        )
    return float(kept_s)
