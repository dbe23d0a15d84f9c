"""Converts every request failure to OpenAI's error shape: our errors, FastAPI's, Starlette's, and bugs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.controller.http.strict_body import is_branch, meant, place_in, said_of
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, error_object, shown
from appliance.store.errors import UnknownCursor

log = logging.getLogger("appliance.controller")


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


# OpenAI's error object, the body of every error response. The OpenAPI schema is written out: for a "model", FastAPI
# builds a validator per route and status, which takes a third of the app's construction time. With "4XX" present,
# FastAPI does not add its own 422, which is never sent here.
_ERROR_ANSWER = {
    "application/json": {
        "schema": {
            "title": "ErrorAnswer",
            "type": "object",
            "required": ["error"],
            "properties": {"error": ErrorObject.model_json_schema()},
        }
    }
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": _ERROR_ANSWER, "description": "Refused: the message says what was given and what is expected."},
    "5XX": {"content": _ERROR_ANSWER, "description": "Not done: the message says why, or which log says it."},
}


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UnknownCursor, _unknown_cursor)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _bug)


def _answer(
    status: int, message: str, kind: str, param: str | None, code: str | None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_object(message, kind, param, code), status, headers)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status_code, error.headers)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {shown(request.url.path)}"
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 404:
        hint = "OpenAI's clients want a base URL that ends with /v1, Anthropic's one without it."
        return _answer(404, f"Unknown request URL: {where}. {hint}", "invalid_request_error", None, "unknown_url")
    if error.status_code == 405:
        allowed = (headers or {}).get("allow") or (headers or {}).get("Allow", "")
        return _answer(
            405,
            f"Not allowed: {where}; this URL takes {allowed}.",
            "invalid_request_error",
            None,
            "method_not_supported",
            headers,
        )
    return _answer(error.status_code, str(error.detail), "invalid_request_error", None, None, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = meant(error.errors())
    place = _place(first["loc"], error.body)
    if not place:
        message = "The body must be a JSON object, sent with content-type application/json."
        return _answer(400, message, "invalid_request_error", None, "invalid_body")
    param = ".".join(place)
    message, code = said_of(param, first)
    return _answer(400, message, "invalid_request_error", param or None, code)


def _place(loc: Sequence[str | int], body: Any) -> list[str]:
    if loc[0] == "body":
        return place_in(body, loc[1:])
    return [str(part) for part in loc if part not in ("query", "path", "header") and not is_branch(part)]


async def _unknown_cursor(request: Request, error: Exception) -> JSONResponse:
    return _answer(400, f"{error}.", "invalid_request_error", "after", "invalid_cursor")


async def _client_left(request: Request, error: Exception) -> JSONResponse:
    """Nobody receives the answer; 499 is nginx's status for it."""
    log.info("%s %s: the client left before its body was complete", request.method, request.url.path)
    return _answer(499, "The client left before its request was complete.", "invalid_request_error", None, None)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """Starlette logs the traceback after this answer; the client learns only where to look."""
    request_id = request.scope.get("state", {}).get("request_id", "")
    log.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    message = f"The server had an error while processing your request {request_id}; its log has the details."
    return _answer(500, message, "server_error", None, None, NEVER_RETRY | {"x-request-id": request_id})
