"""/v1/files: upload, list, retrieve, content, delete (https://platform.openai.com/docs/api-reference/files)."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import BaseModel, ValidationError

from appliance.controller.context.context import ControllerContext
from appliance.controller.files import form, storage
from appliance.controller.files.storage import FILES
from appliance.controller.http.resource import is_retry, part
from appliance.controller.http.routers import FORM_BYTES, takes
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import Caller, Principal
from appliance.store.ids import new_id
from appliance.store.objects import batches, files
from appliance.store.rows import FileRow


class _Form(BaseModel):
    """What a form says beside its file."""

    purpose: storage.Purpose
    expires_after: storage.ExpiresAfter | None = None


def _filters(purpose: Annotated[str | None, Query(max_length=64)] = None) -> dict[str, Any]:
    return {"purpose": purpose}


def routes(context: ControllerContext) -> APIRouter:
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
        if (batch := batches.using_file(db, row.id)) is not None:
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
        upload = await form.receive(request, incoming, context.config.upload_bytes)
        fields = _form_of(upload.fields)
        keep_s, by = fields.expires_after.seconds if fields.expires_after else None, (caller.owner, caller.key_id)
        made = storage.row_of(incoming, upload.filename, fields.purpose, upload.sha256, *by, keep_s, file_id)
        row = await storage.described(context, incoming, made)

        def make() -> FileRow:
            context.quotas.check(caller, row.bytes)
            storage.keep(context, row, incoming)
            return row

        described = orjson.dumps([upload.sha256, upload.filename, upload.fields], option=orjson.OPT_SORT_KEYS)
        return FILES.attempt(request, caller, described).once(make)


def _form_of(fields: dict[str, str]) -> _Form:
    """Raises RequestValidationError."""
    names = {name: f"expires_after[{name}]" for name in storage.ExpiresAfter.model_fields}
    expiry = {name: fields[field] for name, field in names.items() if field in fields}
    given: dict[str, Any] = {"purpose": fields["purpose"]} if "purpose" in fields else {}
    given |= {"expires_after": expiry} if expiry else {}
    try:
        return _Form.model_validate_strings(given)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found, body=given) from error
