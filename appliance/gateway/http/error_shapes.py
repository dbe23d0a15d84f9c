"""Formats errors for clients: OpenAI's object on every route except Anthropic's, `/v1/messages` and below. Pure.

In a stream: `data: {"error": …}` for chat and completions, as vLLM and OpenAI's older routes do; for /v1/responses
OpenAI's event `error` (https://platform.openai.com/docs/api-reference/responses-streaming/error) with the object inside
it as well, by which its SDK raises; Anthropic's event `error`.

Anthropic's shape and types after https://docs.anthropic.com/en/api/errors: {"type": "error", "error": {"type",
"message"}, "request_id"}; what is 503 elsewhere is 529 `overloaded_error` there. Both SDKs retry both.
"""

from __future__ import annotations

from http import HTTPStatus

import orjson

from appliance.gateway.access.request import Request
from appliance.gateway.core.errors import HttpError, engine_dead, engine_failed
from appliance.gateway.core.routes import RESPONSES, is_anthropic
from appliance.gateway.http import wire

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def shaped(error: HttpError, request: Request | None, request_id: bytes) -> tuple[int, bytes]:
    """Status and body. request: None if its head could not be read."""
    error = engine_failed() if engine_dead(error) else error  # a dying engine speaks of its own stack traces
    if request is None or not is_anthropic(request.path):
        return error.status, error.body()
    status = 529 if error.status == 503 else error.status
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id.decode()}
    return status, orjson.dumps(body)


def error_response(error: HttpError, request_id: bytes) -> bytes:
    """A whole response that ends its connection, for bytes that are no request."""
    status, body = shaped(error, None, request_id)
    lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()), b"x-request-id: %b" % request_id]
    lines += [b"content-type: application/json", *(b"%b: %b" % pair for pair in wire.error_headers(error))]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(lines)


def event(error: HttpError, request: Request, sent: int) -> bytes:
    """The error as an event of a stream that has had `sent` events."""
    _, body = shaped(error, request, request.request_id)
    if request.route.name == RESPONSES:
        inner = orjson.loads(body)["error"]
        fields = {"code": inner["code"] or inner["type"], "message": inner["message"], "param": inner["param"]}
        body = orjson.dumps({"type": "error", "sequence_number": sent, **fields, "error": inner})
    elif not is_anthropic(request.path):
        return b"data: %b\n\n" % body
    return b"event: error\ndata: %b\n\n" % body
