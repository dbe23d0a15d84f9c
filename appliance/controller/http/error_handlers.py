"""Converts every request failure to OpenAI's error shape: our errors, FastAPI's, Starlette's, and bugs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.controller.http.strict_body import first_error, is_branch, message_of, place_in
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, BadRequest, NotFound, shown
from appliance.store.errors import UnknownCursor

log = logging.getLogger("appliance.controller")


# OpenAI's error object, the body of every error response. The OpenAPI schema is written out: for a "model", FastAPI
# builds a validator per route and status, which takes a third of the app's construction time. With "4XX" present,
# FastAPI does not add its own 422, which is never sent here.
_ERROR = {"type": "object", "required": ["message", "type", "param", "code"]}
_ERROR_ANSWER = {
    "application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}}
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": _ERROR_ANSWER, "description": "Refused: the message says what was given and what is expected."},
    "5XX": {"content": _ERROR_ANSWER, "description": "Not done: the message says why, or which log says it."},
}


def install(app: FastAPI) -> None:
    for kind in (HTTPException, RequestValidationError, UnknownCursor, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    shaped = _shaped(request, error)
    return JSONResponse(shaped.body(), shaped.status_code, shaped.headers)


def _shaped(request: Request, error: Exception) -> ApiError:
    where = f"{request.method} {shown(request.url.path)}"
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        headers = dict(error.headers) if error.headers else {}
        if error.status_code == 404:
            hint = "OpenAI's clients want a base URL that ends with /v1, Anthropic's one without it."
            return NotFound(f"Unknown request URL: {where}. {hint}", code="unknown_url")
        code, message = None, str(error.detail)
        if error.status_code == 405:
            code = "method_not_supported"
            message = f"Not allowed: {where}; this URL takes {headers.get('allow') or headers.get('Allow', '')}."
        return ApiError(error.status_code, message, code=code, headers=headers)
    if isinstance(error, RequestValidationError):
        first = first_error(error.errors())
        place = _place(first["loc"], error.body)
        if not place:
            message = "The body must be a JSON object, sent with content-type application/json."
            return BadRequest(message, code="invalid_body")
        param = ".".join(place)
        message, code = message_of(param, first)
        return BadRequest(message, param=param or None, code=code)
    if isinstance(error, UnknownCursor):
        return BadRequest(f"{error}.", param="after", code="invalid_cursor")
    if isinstance(error, ClientDisconnect):  # nobody receives the answer; 499 is nginx's status for it
        log.info("%s: the client left before its body was complete", where)
        return ApiError(499, "The client left before its request was complete.")
    # Starlette logs the traceback after this answer; the client learns only where to look.
    request_id = request.scope.get("state", {}).get("request_id", "")
    log.error("%s failed: %s", where, type(error).__name__)
    message = f"The server had an error while processing your request {request_id}; its log has the details."
    return ApiError(500, message, kind="server_error", headers=NEVER_RETRY | {"x-request-id": request_id})


def _place(loc: Sequence[str | int], body: Any) -> list[str]:
    if loc[0] == "body":
        return place_in(body, loc[1:])
    return [str(part) for part in loc if part not in ("query", "path", "header") and not is_branch(part)]
