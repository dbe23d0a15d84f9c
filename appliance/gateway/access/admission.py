"""Rules by which a request is admitted from its head: which key it names (as a hash, which `Dispatch.admit` of
server/dispatch.py looks up), whether its scopes suffice, and whether its body is read. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

from appliance.gateway.access.page_login import PAGE_HEADER
from appliance.gateway.access.request import Headers, Request
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import ADMIN, Kind, Route
from appliance.gateway.routing.table import Caller

LOGIN_BODY_BYTES: Final = 16 * 1024
_JSON: Final = b"application/json"
_WITH_BODY: Final = frozenset({b"POST", b"PUT", b"PATCH"})


def key_digest(headers: Headers) -> str:
    """Return the SHA-256 of the request's key, as in the table; empty if it brings none, but the header of the page
    (page_login.py). Raises HttpError 401 without either."""
    value = headers.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
    else:
        key = headers.get(b"x-api-key", b"")
    if not key:
        if value is None and PAGE_HEADER in headers:
            return ""
        raise errors.missing_key()
    return hashlib.sha256(key).hexdigest()


def check_scopes(route: Route, caller: Caller) -> None:
    """Raises HttpError 403 for a key without any of the route's scopes."""
    if ADMIN not in caller.scopes and not (route.scopes & caller.scopes):
        raise errors.missing_scope(" or ".join(sorted(route.scopes)))


def check_head(request: Request, limits: Limits) -> None:
    """Raises HttpError 413, 415 or 417 for a body that can be refused unread."""
    headers, route = request.headers, request.route
    assert route is not None
    expect = headers.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise errors.HttpError(417, "Only Expect: 100-continue is understood.", code="expectation_failed")
    length, limit = request.content_length, body_limit(route, limits)
    if (length or request.chunked) and request.method not in _WITH_BODY:
        # A body has no meaning there, so servers differ about it: one that does not read it parses it as the next head.
        raise errors.unexpected_body(request.method.decode())
    if length is not None and length > limit:
        raise errors.body_too_large(limit)
    coding = headers.get(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        # The size of a compressed body does not bound the cost of reading it.
        raise HttpError(415, "Compressed request bodies are not accepted.", code="unsupported_content_encoding")
    if route.kind is Kind.INFERENCE:
        kind = headers.get(b"content-type")
        if kind is not None and not kind.lower().startswith(_JSON):
            given = kind[:100].decode("ascii", "replace")
            raise HttpError(
                415,
                f"Unsupported content type {given!r}, expected application/json "
                "(curl: -H 'content-type: application/json').",
                code="unsupported_content_type",
            )


def body_limit(route: Route | None, limits: Limits) -> int:
    """The size in bytes."""
    if route is None or route.kind is Kind.INFERENCE:
        return limits.inference_body_bytes
    if route.kind is Kind.LOGIN:
        return LOGIN_BODY_BYTES
    if route.kind is not Kind.CONTROL:
        return 0
    return limits.upload_body_bytes if route.upload else limits.control_body_bytes
