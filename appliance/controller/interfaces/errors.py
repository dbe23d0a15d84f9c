"""Errors of the controller and their answers: always OpenAI's error object, whether the error is the controller's,
FastAPI's, Starlette's or a bug.

OperationFailed       long work ended with a reason a person can act on (raised by `LibraryOps`)
SwapFailed            the replicas could not take the wanted version (raised by `Scheduler`)

ApiError (an HTTPException)
├── BadRequest        400
│   └── InvalidValue  of one parameter
├── KeyRevoked        401
├── Forbidden         403
├── NotFound          404
├── Conflict          409, never to be retried
├── BodyTooLarge      413
└── (others by their status: 401 without an identity, 429 and 413 of a bound, 507 of the disk)

The `openai` client retries 408, 409, 429 and 5xx unless the answer has `x-should-retry: false`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from appliance.store.database import UnknownCursor
from runtime.logs import REQUEST_ID

log = logging.getLogger("appliance.controller")

NEVER_RETRY = {"x-should-retry": "false"}


class OperationFailed(Exception):
    """A long operation failed for a reason that a user can act on: `code` for programs, the message for people."""

    def __init__(self, message: str, *, code: str = "operation_failed"):
        super().__init__(message)
        self.code = code


class SwapFailed(Exception):
    """Replicas could not be swapped to the wanted version; they keep the previous version or return to it."""

    def __init__(self, model: str, wanted: str | None, reason: str):
        super().__init__(f"the replicas of {model} could not be brought to version {wanted}: {reason}")


class ApiError(HTTPException):
    """An answer with OpenAI's error object. It is an HTTPException because FastAPI's parsing of bodies passes only
    HTTPExceptions on unchanged.

    message: text for people. param: dotted path of the field at fault. code: name for programs. kind: the object's
    `type`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers) if headers else None)
        self.message, self.kind, self.param, self.code = message, kind, param, code

    def body(self) -> dict[str, Any]:
        return error_object(self.message, self.kind, self.param, self.code)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BadRequest(ApiError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(400, message, param, code)


class InvalidValue(BadRequest):
    def __init__(self, message: str, param: str | None):
        super().__init__(message, param, "invalid_value")


class NotFound(ApiError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(404, message, param, code)


class Conflict(ApiError):
    """The object's state forbids it; repeating the same request cannot help."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(409, message, param, code, headers=NEVER_RETRY)


class Forbidden(ApiError):
    def __init__(self, needed: str):
        message = f"You have insufficient permissions for this operation. The API key needs the scope: {needed}."
        super().__init__(403, message, code="insufficient_permissions")


class KeyRevoked(ApiError):
    """The key ended; gateways use the same text (`gateway.core.errors.key_ended`). how: from `keys.how_ended`."""

    def __init__(self, how: str):
        super().__init__(401, f"The API key of this request {how} while it ran.", code="invalid_api_key")


class BodyTooLarge(ApiError):
    def __init__(self, limit_bytes: int, param: str | None = None):
        message = f"The request body is over the limit of {limit_bytes} bytes of this endpoint."
        super().__init__(413, message, param, "request_too_large")


def shown(value: Any, limit: int = 120) -> str:
    """Quote a client's value for a message, with bounded length and without control characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


# --- every failure of a request as an error object

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
    async def answer(request: Request, error: Exception) -> JSONResponse:
        shaped = _shaped(request, error)
        return JSONResponse(shaped.body(), shaped.status_code, shaped.headers)

    for kind in (HTTPException, RequestValidationError, UnknownCursor, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


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
        if error.status_code == 400:  # Starlette's error for a form that it cannot read
            code = "invalid_body"
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
    if isinstance(error, ClientDisconnect):  # not a bug, and nobody receives the answer; 499 is nginx's status for this
        return ApiError(499, "The client left before its request was complete.")
    # Starlette logs the traceback after this answer; the client learns only where to look.
    log.error("%s failed: %s", where, type(error).__name__)
    message = f"The server had an error while processing your request {REQUEST_ID.get()}; its log has the details."
    return ApiError(500, message, kind="server_error", headers=NEVER_RETRY)


def _place(first: Mapping[str, Any], value: Any) -> list[str]:
    """Return the path of a mistake in a client's value, without pydantic's parts for branches of unions, whose names no
    client knows."""
    where, *loc = first["loc"]
    if where != "body":
        return [str(part) for part in loc[:1]]
    place = list[str]()
    for part in loc:
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif first["type"] != "missing" or part is not loc[-1]:
            continue
        place.append(str(part)[:64])
    return place


def first_error(errors: Sequence[Any]) -> dict[str, Any]:
    """Choose the error to report: in a union, the error in the branch that accepted most of the value; instead of a
    missing field, an unknown field of the same object, because a misspelt name causes both."""
    first: dict[str, Any] = errors[0]
    parent = first["loc"][:-1]
    if first["type"] == "missing":
        unknown = (error for error in errors if error["type"] == "extra_forbidden" and error["loc"][:-1] == parent)
        return next(unknown, first)
    same_place = (error for error in errors if error["loc"][: len(parent)] == parent)
    return max(same_place, key=lambda error: len(error["loc"]))


def message_of(param: str, first: dict[str, Any]) -> tuple[str, str]:
    """Return message and code of a mistake; the gateway uses the same codes."""
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}.", "unknown_parameter"
    if kind == "missing":
        return f"Missing required parameter: '{param}'.", "missing_required_parameter"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return f"Invalid value for '{param}': {first['msg']}; {shown(first.get('input'))} was given.", code
