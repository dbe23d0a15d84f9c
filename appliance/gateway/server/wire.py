"""Filters headers in both directions, and formats errors for clients. Pure.

An engine's request head contains nothing copied from the client; the controller gets the client's headers except our
own, hop-by-hop and framing headers.

An error is OpenAI's object on every route except Anthropic's, `/v1/messages` and below, whose shape and types are after
https://docs.anthropic.com/en/api/errors; what is 503 elsewhere is 529 `overloaded_error` there. In a stream: `data:
{"error": …}` for chat and completions, as vLLM and OpenAI's older routes do; for /v1/responses OpenAI's event `error`
(https://platform.openai.com/docs/api-reference/responses-streaming/error) with the object inside it as well, by which
its SDK raises; Anthropic's event `error`.
"""

from __future__ import annotations

import re
from http import HTTPStatus

import orjson

from appliance.gateway.access.request import Headers, Request
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import RESPONSES, Kind, is_anthropic
from appliance.gateway.routing.table import NOBODY

# An engine's answer says so too (serve/api/answers.py).
VERSION = b"x-appliance-model-version"
# A client's, for work that gives way to people: `batch`.
CLASS = b"x-appliance-class"
# On the private socket, where the box itself asks: the id of the key it asks for, empty for none.
KEY_ID = b"x-appliance-key-id"
# Headers that pass in neither direction. Some servers treat `_` and `-` in header names as equal, so a client's
# x_appliance_scopes must not pass either.
_OF_A_HOP = rb"connection|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|content-length|x-request-id"
_OURS = rb"x[-_]appliance[-_].*"
_NOT_UPSTREAM = re.compile(
    rb"%b|%b|authorization|x-api-key|cookie|expect|host|(x-)?forwarded.*|x-real-ip" % (_OF_A_HOP, _OURS)
)
_NOT_DOWNSTREAM = re.compile(rb"%b|%b|date|server|set-cookie" % (_OF_A_HOP, _OURS))
_TRACE = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def accepted_request_id(headers: Headers) -> bytes | None:
    """The client's own request id if it is short and harmless, else None."""
    value = headers.get(b"x-request-id")
    return value if value is not None and _REQUEST_ID.match(value) else None


def accepted_trace(headers: Headers) -> bytes:
    """The client's `traceparent` if it is well-formed by W3C Trace Context (version 00), else empty."""
    value = headers.get(b"traceparent")
    return value if value is not None and _TRACE.match(value) else b""


def controller_headers(request: Request, token: bytes) -> list[tuple[str, str]]:
    """For the controller: the client's headers without ours, hop-by-hop and framing ones, and who asks."""
    kept = _passing(request.headers, _NOT_UPSTREAM)
    own = identity(request, token).items()
    return [*((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept), *own]


def identity(request: Request, token: bytes) -> dict[str, str]:
    """Who asks, and the proof that a gateway says so (appliance.controller.http.peers)."""
    caller = request.caller
    if caller is NOBODY:
        assert request.route.kind is Kind.LOGIN, "all others name a key"
        return own_identity(request.request_id, token)
    by = {"x-appliance-session": request.session} if request.session else {"x-appliance-secret": caller.secret}
    return by | own_identity(request.request_id, token, caller.id, ",".join(sorted(caller.scopes)))


def own_identity(request_id: bytes, token: bytes, key_id: str = "gateway", scopes: str = "gateway") -> dict[str, str]:
    """Of what the gateway itself asks, for no key."""
    return {
        "x-request-id": request_id.decode(),
        "x-appliance-key-id": key_id,
        "x-appliance-scopes": scopes,
        "x-appliance-gateway": token.decode(),
    }


def controller_response_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Select the controller's response headers for the client."""
    return _passing(headers, _NOT_DOWNSTREAM)


def error_headers(error: HttpError) -> list[tuple[bytes, bytes]]:
    extra: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        extra.append((b"retry-after", b"%d" % error.retry_after_s))
    # The `openai` client retries 409 unless told not to, but a conflict does not resolve by itself.
    should_retry = False if error.should_retry is None and error.status == 409 else error.should_retry
    if should_retry is not None:
        extra.append((b"x-should-retry", b"true" if should_retry else b"false"))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.allow is not None:
        extra.append((b"allow", error.allow.encode()))
    return extra


def _passing(headers: Headers, stops: re.Pattern[bytes]) -> list[tuple[bytes, bytes]]:
    """Headers that neither match `stops` nor are named in the Connection header."""
    of_connection = {part.strip().lower() for part in headers.get(b"connection", b"").split(b",")}
    return [(name, value) for name, value in headers.items() if name not in of_connection and not stops.fullmatch(name)]


# -- errors


def shaped(error: HttpError, request: Request | None, request_id: bytes) -> tuple[int, bytes]:
    """Status and body. request: None if its head could not be read."""
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
    lines += [b"content-type: application/json", *(b"%b: %b" % pair for pair in error_headers(error))]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(lines)


def error_event(error: HttpError, request: Request, sent: int) -> bytes:
    """The error as an event of a stream that has had `sent` events."""
    _, body = shaped(error, request, request.request_id)
    if request.route.name == RESPONSES:
        inner = orjson.loads(body)["error"]
        fields = {"code": inner["code"] or inner["type"], "message": inner["message"], "param": inner["param"]}
        body = orjson.dumps({"type": "error", "sequence_number": sent, **fields, "error": inner})
    elif not is_anthropic(request.path):
        return b"data: %b\n\n" % body
    return b"event: error\ndata: %b\n\n" % body
