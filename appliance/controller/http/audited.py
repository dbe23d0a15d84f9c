"""Writes an audit row for every request that changes something, on every route.

All routes except reading ones pass through `audited`, because a new route could forget a call of its own. A handler
with more detail records its own row (`audit.record`), and then none is added. Exceptions are listed with their
reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.controller.context import audit
from appliance.controller.interfaces.principal import named_principal
from appliance.store.database import counting_changes
from appliance.store.errors import UnknownCursor

# Errors of a request that most often has changed nothing; so has a client that disconnects during its body.
_REFUSALS = (HTTPException, RequestValidationError, UnknownCursor, ClientDisconnect)
READS = frozenset({"GET", "HEAD", "OPTIONS"})
_PARSED_BYTES = 256 * 1024
Route = tuple[str, str]

NOT_AUDITED: Mapping[Route, str] = {
    ("POST", "/v1/responses"): "a request of inference in background, as the access log and usage have it",
    ("POST", "/internal/responses"): "copies of answers from gateways, asked for by requests of inference",
    ("POST", "/v1/uploads/{upload_id}/parts"): "a part of what upload.create and upload.complete tell of",
    ("POST", "/v1/files/{file_id}/check"): "reads a file; its report alone is kept",
    ("POST", "/admin/v1/mode/plan"): "a preview; nothing is changed",
    ("POST", "/admin/v1/plan"): "says what would fit; nothing is changed",
    ("POST", "/admin/v1/session-keys"): "a key of one command on the box itself, which needs none; inference alone",
    ("DELETE", "/admin/v1/session-keys/{key_id}"): "the end of such a command",
    ("POST", "/admin/v1/sessions/{session_id}/touch"): "its person is still at the page",
    ("POST", "/admin/v1/oidc/begin"): "somebody goes to the login provider; who comes back is known by finish",
}


@dataclass(frozen=True)
class Change:
    """action: "noun.verb". told: fields of the answer that go into the row's detail."""

    action: str
    told: tuple[str, ...] = ()


_JOB = ("status", "model", "training_file")
CHANGES: Mapping[Route, Change] = {
    ("POST", "/v1/files"): Change("file.create", ("filename", "purpose", "bytes")),
    ("DELETE", "/v1/files/{file_id}"): Change("file.delete"),
    ("POST", "/v1/files/{file_id}/prepare"): Change("file.prepare", ("made", "dropped", "masked")),
    ("POST", "/v1/uploads"): Change("upload.create", ("filename", "purpose", "bytes")),
    ("POST", "/v1/uploads/{upload_id}/complete"): Change("upload.complete", ("filename", "bytes")),
    ("POST", "/v1/uploads/{upload_id}/cancel"): Change("upload.cancel"),
    ("POST", "/v1/batches"): Change("batch.create", ("endpoint", "input_file_id")),
    ("POST", "/v1/batches/{batch_id}/cancel"): Change("batch.cancel", ("status",)),
    ("POST", "/v1/fine_tuning/jobs"): Change("job.create", ("model", "training_file", "validation_file")),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): Change("job.cancel", _JOB),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"): Change("job.pause", _JOB),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"): Change("job.resume", _JOB),
    ("POST", "/v1/fine_tuning/checkpoints/{name:path}/permissions"): Change("permission.create", ("first_id",)),
    ("DELETE", "/v1/fine_tuning/checkpoints/{name:path}/permissions/{permission_id}"): Change("permission.delete"),
    ("POST", "/admin/v1/forget"): Change("owner.forget"),
    ("POST", "/admin/v1/sessions"): Change("session.create", ("key", "agent")),
    ("DELETE", "/admin/v1/sessions/{session_id}"): Change("session.end"),
    ("POST", "/v1/chat/completions/{completion_id}"): Change("completion.update"),
    ("DELETE", "/v1/chat/completions/{completion_id}"): Change("completion.delete"),
    ("DELETE", "/v1/responses/{response_id}"): Change("response.delete"),
    ("POST", "/v1/responses/{response_id}/cancel"): Change("response.cancel", ("status",)),
}


def audited(
    handle: Callable[[Request], Awaitable[Response]], method: str, path: str
) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler, followed by its audit row: "done" once it has answered, "failed" after an internal error or
    a refusal that came after the first change. A refusal that changed nothing leaves no row."""
    if method in READS or (method, path) in NOT_AUDITED:
        return handle
    # A route not listed here is recorded too, by its method and path.
    change = CHANGES.get((method, path)) or Change(f"{method.lower()} {path}")

    async def told(request: Request) -> Response:
        with audit.recording() as recorded, counting_changes() as changes:
            try:
                response = await handle(request)
            except Exception as error:
                refused = isinstance(error, _REFUSALS) and getattr(error, "status_code", 400) < 500
                # The status does not say whether anything was changed; the store does.
                if not recorded and (changes.rows or not refused):
                    await _record(request, change, "failed", {}, f"{type(error).__name__}: {error}"[:500])
                raise
            if not recorded and response.status_code < 400:
                await _record(request, change, "done", _fields(response), "")
            elif not recorded and changes.rows:
                await _record(request, change, "failed", {}, f"answered {response.status_code}")
            return response

    return told


async def _record(request: Request, change: Change, outcome: Any, fields: dict[str, Any], error: str) -> None:
    named = "/".join(str(value) for value in request.path_params.values())
    detail = {name: fields[name] for name in change.told if fields.get(name) is not None}
    if error:
        detail["error"] = error
    audit.record(
        request.app.state.context,
        named_principal(request),
        change.action,
        named or str(fields.get("id") or fields.get("name") or ""),
        outcome=outcome,
        **detail,
    )


def _fields(response: Response) -> dict[str, Any]:
    """Fields of a JSON object answer; none for other answers."""
    body = getattr(response, "body", b"")
    if not body or len(body) > _PARSED_BYTES:
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
