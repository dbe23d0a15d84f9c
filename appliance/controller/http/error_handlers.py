"""Converts every request failure to OpenAI's error shape: our errors, FastAPI's, Starlette's, and bugs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, BadRequest, NotFound, shown
from appliance.store.errors import UnknownCursor
from runtime.logs import REQUEST_ID

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
        place = _place(first, error.body)
        if not place:
            message = "The body must be a JSON object, sent with content-type application/json."
            return BadRequest(message, code="invalid_body")
        param = ".".join(place)
        message, code = message_of(param, first)
        return BadRequest(message, param, code)
    if isinstance(error, UnknownCursor):
        return BadRequest(f"{error}.", "after", "invalid_cursor")
    if isinstance(error, ClientDisconnect):  # nobody receives the answer; 499 is nginx's status for it
        log.info("%s: the client left before its body was complete", where)
        return ApiError(499, "The client left before its request was complete.")
    # Starlette logs the traceback after this answer; the client learns only where to look.
    log.error("%s failed: %s", where, type(error).__name__)
    message = f"The server had an error while processing your request {REQUEST_ID.get()}; its log has the details."
    return ApiError(500, message, kind="server_error", headers=NEVER_RETRY)


def _place(first: Mapping[str, Any], value: Any) -> list[str]:
    """The path of a mistake in a client's value, without the branches of unions that pydantic names by kinds and by
    names of ours, which no client knows."""
    where, *loc = first["loc"]
    if where != "body":
        return [str(part) for part in loc[:1]]
    place = list[str]()
    for part in loc:
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif first["type"] != "missing" or part is not loc[-1]:
            continue
        place.append(str(part)[:64])
    return place


def first_error(errors: Sequence[Any]) -> dict[str, Any]:
    """The first error. Of a union, the error of the branch into which the value got furthest: for a wrong object in
    place of true or false, the mistake in the object. For a missing field, an unknown one of the same object: a
    misspelt name is both, and the message of the missing one alone would not show it."""
    first: dict[str, Any] = errors[0]
    parent = first["loc"][:-1]
    if first["type"] == "missing":
        return next((one for one in errors if one["type"] == "extra_forbidden" and one["loc"][:-1] == parent), first)
    return max((one for one in errors if one["loc"][: len(parent)] == parent), key=lambda one: len(one["loc"]))


def message_of(param: str, first: dict[str, Any]) -> tuple[str, str]:
    """Message and code of this mistake: the gateway has the same codes."""
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}.", "unknown_parameter"
    if kind == "missing":
        return f"Missing required parameter: '{param}'.", "missing_required_parameter"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return f"Invalid value for '{param}': {first['msg']}; {shown(first.get('input'))} was given.", code
