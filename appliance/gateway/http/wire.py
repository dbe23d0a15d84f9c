"""Writes HTTP heads and filters headers in both directions. Pure.

RFC 9110 (semantics) and RFC 9112 (HTTP/1.1 framing). An engine's request head contains nothing copied from the client;
the controller gets the client's headers except our own, hop-by-hop and framing headers.
"""

from __future__ import annotations

import http
import re
from typing import Final

from appliance.gateway.access.request import Headers, Pairs, Request
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import Kind

# An engine's answer says so too (serve/api/answer_version.py).
VERSION = b"x-appliance-model-version"
COMPUTED = b"x-appliance-computed"
# The tunnel to another node says so (runtime/network/tunnel.py).
UNREACHED = b"x-appliance-unreached"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

STATUS_LINE: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"authorization",
    b"x-api-key",
    b"content-length",
    b"cookie",
    b"expect",
    b"forwarded",
    b"host",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-prefix",
    b"x-forwarded-proto",
    b"x-real-ip",
    b"x-request-id",
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id", b"set-cookie"}

# Some servers treat `_` and `-` in header names as equal, so a client's x_appliance_scopes must not pass either.
_OURS = re.compile(rb"x[-_]appliance[-_]")
_TRACE = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_WRITTEN: Final = 4096
_DIGITS: Final = [b"%d" % number for number in range(_WRITTEN)]
_HEX_LINES: Final = [b"%x\r\n" % number for number in range(_WRITTEN)]
_ENGINE_HEAD: Final = b" HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\nx-request-id: "
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def accepted_request_id(headers: Headers) -> bytes | None:
    """The client's own request id if it is short and harmless, else None."""
    value = headers.get(b"x-request-id")
    return value if value is not None and _REQUEST_ID.match(value) else None


def digits(number: int) -> bytes:
    """Format a number >= 0 for a head; common values are cached."""
    return _DIGITS[number] if number < _WRITTEN else b"%d" % number


def chunk(data: bytes) -> bytes:
    size = len(data)
    return b"%b%b\r\n" % (_HEX_LINES[size] if size < _WRITTEN else b"%x\r\n" % size, data)


def accepted_trace(headers: Headers) -> bytes:
    """The client's `traceparent` if it is well-formed by W3C Trace Context (version 00), else empty."""
    value = headers.get(b"traceparent")
    return value if value is not None and _TRACE.match(value) else b""


def engine_request(path: bytes, request_id: bytes, body: bytes, trace: bytes = b"", owner: bytes = b"") -> bytes:
    """A whole inference request for an engine. owner: what owners take turns by in its queue (serve.api.fair_order)."""
    lines = b"\r\nx-appliance-owner: %b" % owner if owner else b""
    if trace:
        lines = b"%b\r\ntraceparent: %b" % (lines, trace)
    # A format costs less than a join once it is compiled.
    return b"POST %b%b%b%b\r\ncontent-length: %b\r\n\r\n%b" % (
        path,
        _ENGINE_HEAD,
        request_id,
        lines,
        digits(len(body)),
        body,
    )


def get_head(path: bytes, request: Request, token: bytes) -> bytes:
    """A GET by the gateway to the controller on behalf of an admitted key."""
    return b"GET %b HTTP/1.1\r\nhost: appliance\r\n%b" % (path, _identity(request, token))


def own_head(path: bytes, request_id: bytes, length: int, token: bytes) -> bytes:
    """A POST of JSON to the controller by the gateway itself, for no key."""
    return b"POST %b HTTP/1.1\r\nhost: appliance\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b" % (
        path,
        length,
        _identity_lines(request_id, b"gateway", b"gateway", token),
    )


def controller_head(request: Request, token: bytes) -> bytes:
    """Request head for the controller: the client's headers without ours or hop-by-hop ones, plus identity."""
    nominated = _nominated(request.headers)
    lines = [b"%b %b HTTP/1.1\r\nhost: appliance\r\n" % (request.method, request.target)]
    for name, value in request.headers.items():
        if name not in _NOT_UPSTREAM and name not in nominated and not _OURS.match(name):
            lines.append(b"%b: %b\r\n" % (name, value))
    if request.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif request.content_length is not None:
        lines.append(b"content-length: %d\r\n" % request.content_length)
    lines.append(_identity(request, token))
    return b"".join(lines)


def _identity(request: Request, token: bytes) -> bytes:
    caller = request.caller
    if caller is None:
        assert request.route is not None and request.route.kind is Kind.LOGIN, "all others name a key"
        return _identity_lines(request.request_id, b"gateway", b"gateway", token)
    lines = _identity_lines(request.request_id, caller.id.encode(), caller.scopes_header, token)
    by = b"session: %b" % request.session.encode() if request.session else b"secret: %b" % caller.secret
    return b"x-appliance-%b\r\n%b" % (by, lines)


def _identity_lines(request_id: bytes, key_id: bytes, scopes: bytes, token: bytes) -> bytes:
    """The last lines of a head for the controller: the caller, and proof that a gateway wrote it
    (appliance.controller.http.peers)."""
    return (
        b"x-request-id: %b\r\nx-appliance-key-id: %b\r\nx-appliance-scopes: %b\r\nx-appliance-gateway: %b\r\n\r\n"
        % (request_id, key_id, scopes, token)
    )


def controller_response_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Select the controller's response headers for the client."""
    nominated = _nominated(headers)
    return [
        (name, value)
        for name, value in headers.items()
        if name not in _NOT_DOWNSTREAM and name not in nominated and not _OURS.match(name)
    ]


def response_head(
    status: int,
    request_id: bytes,
    *,
    content_type: bytes | None = None,
    length: int | None = None,
    chunked: bool = False,
    close: bool = False,
    version: bytes | None = None,
    processing_s: float | None = None,
    extra: Pairs = (),
) -> bytes:
    """A response head. version: weight version that answers. length None and not chunked: ends with the connection."""
    line = STATUS_LINE.get(status) or b"HTTP/1.1 %d Status\r\n" % status
    parts = [line]
    if request_id:
        parts.append(b"x-request-id: %b\r\n" % request_id)
    if content_type is not None:
        parts.append(b"content-type: %b\r\n" % content_type)
    if version is not None:
        parts.append(b"x-appliance-model-version: %b\r\n" % version)
    if processing_s is not None:
        parts.append(b"openai-processing-ms: %d\r\n" % (processing_s * 1000))
    for name, value in extra:
        parts.append(b"%b: %b\r\n" % (name, value))
    if chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    elif length is not None:
        parts.append(b"content-length: %d\r\n" % length)
    if close:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def whole_response(
    status: int,
    request_id: bytes,
    content_type: bytes,
    version: bytes | None,
    processing_s: float,
    body: bytes,
    *,
    extra: Pairs,
    close: bool,
) -> bytes:
    """A complete engine answer: `response_head` and body in one call, the common case."""
    lines = b"" if version is None else b"x-appliance-model-version: %b\r\n" % version
    for name, value in extra:
        lines = b"%b%b: %b\r\n" % (lines, name, value)
    return b"%bx-request-id: %b\r\ncontent-type: %b\r\n%bopenai-processing-ms: %b\r\ncontent-length: %b%b%b" % (
        STATUS_LINE.get(status) or b"HTTP/1.1 %d Status\r\n" % status,
        request_id,
        content_type,
        lines,
        digits(int(processing_s * 1000)),
        digits(len(body)),
        b"\r\nconnection: close\r\n\r\n" if close else b"\r\n\r\n",
        body,
    )


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


def retry_after_s(headers: Headers) -> int | None:
    """Retry-After of an upstream answer in seconds (the date form is not used by ours)."""
    value = headers.get(b"retry-after", b"")
    return int(value) if value.isdigit() and len(value) < 10 else None


def computed(value: bytes) -> tuple[int, int]:
    """Tokens of the prompt and of the answer that an engine had computed when it refused to go on."""
    prompt, _, written = value.partition(b" ")
    read = prompt.isdigit() and written.isdigit() and len(prompt) < 13 and len(written) < 13
    return (int(prompt), int(written)) if read else (0, 0)


def _nominated(headers: Headers) -> frozenset[bytes]:
    value = headers.get(b"connection")
    return frozenset(part.strip().lower() for part in value.split(b",")) if value else frozenset()
