"""Checks a request by its head: its key or login of the page, scopes, and bodies that can be refused unread. Pure.

A login's token has two halves. One is a cookie that no script reads; browsers send it to every port of a host, also
with requests of other pages of that host. The page's own origin keeps the other and sends it in a header that a form,
an image or a link cannot have. Only both together name a login, for requests of the page itself.
"""

from __future__ import annotations

import hashlib
from typing import Final

from appliance.gateway.access.request import Headers, Pairs, Request
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import ADMIN, Kind, Route
from appliance.gateway.routing.table import Caller

LOGIN_BODY_BYTES: Final = 16 * 1024
PAGE_HEADER: Final = b"x-appliance-page"
# From the controller: `ID=HALF; Max-Age=…`, which clients get as cookies.
COOKIE_HEADER: Final = b"x-appliance-cookie"
COOKIE_PATHS: Final = (b"/admin/v1", b"/v1")
_JSON: Final = b"application/json"
_WITH_BODY: Final = frozenset({b"POST", b"PUT", b"PATCH"})
_READS: Final = frozenset({b"GET", b"HEAD"})


def key_digest(headers: Headers) -> str:
    """Return the SHA-256 of the request's key, as in the table; empty if it brings none, but the header of the page.
    Raises HttpError 401 without either."""
    value = headers.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
    else:
        key = headers.get(b"x-api-key", b"")
    if not key:
        if value is None and PAGE_HEADER in headers:
            return ""
        message = "You didn't provide an API key. Send it in an Authorization header: Authorization: Bearer YOUR_KEY."
        raise HttpError(401, message, code="missing_api_key")
    return hashlib.sha256(key).hexdigest()


def login_digest(request: Request) -> str:
    """The SHA-256 of the login's token, as in the table. Raises HttpError 401 without its cookie, 403 for a request of
    another page."""
    headers = request.headers
    check_same_origin(request)
    name, _, half = headers[PAGE_HEADER].partition(b".")
    cookie = _cookie(headers.get(b"cookie", b""), name)
    if not name or not half or not cookie:
        raise errors.session_ended()
    return hashlib.sha256(b"%b.%b" % (cookie, half)).hexdigest()


def check_same_origin(request: Request) -> None:
    """Raises HttpError 403 for a request of another page.

    Browsers name a request's site (https://www.w3.org/TR/fetch-metadata/), but over plain HTTP only to this machine;
    elsewhere the origin header names it, except for reads."""
    headers = request.headers
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        by_the_page = site == b"same-origin"
    elif origin is not None:
        by_the_page = origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
    else:
        by_the_page = request.method in _READS
    if not by_the_page:
        raise HttpError(403, "A login of the page is only for requests of the page itself.", code="cross_site_request")


def _cookie(given: bytes, name: bytes) -> bytes:
    for pair in given.split(b";"):
        field, _, value = pair.partition(b"=")
        if field.strip() == name:
            return value.strip()
    return b""


def cookies(headers: Headers, tls: bool) -> Pairs:
    """The cookies that an answer of the controller with these headers sets. tls: this gateway speaks TLS."""
    given = headers.get(COOKIE_HEADER)
    if given is None:
        return ()
    secure = b"; Secure" if tls and not given.endswith(b"; Secure") else b""
    return [
        (b"set-cookie", b"%b%b; HttpOnly; SameSite=Strict; Path=%b" % (given, secure, path)) for path in COOKIE_PATHS
    ]


def check_scopes(route: Route, caller: Caller) -> None:
    """Raises HttpError 403 for a key without any of the route's scopes."""
    if ADMIN not in caller.scopes and not (route.scopes & caller.scopes):
        needed = " or ".join(sorted(route.scopes))
        message = f"You have insufficient permissions for this operation. The API key needs the scope: {needed}."
        raise HttpError(403, message, code="insufficient_permissions")


def check_head(request: Request, limits: Limits) -> None:
    """Raises HttpError 400, 413 or 415 for a body that can be refused unread."""
    headers, route = request.headers, request.route
    length, limit = request.content_length, body_limit(route, limits)
    if (length or request.chunked) and request.method not in _WITH_BODY:
        # A body has no meaning there, so servers differ about it: one that does not read it parses it as the next head.
        method = request.method.decode()
        raise HttpError(400, f"A {method} request has no body here. Send it without one.", code="unexpected_body")
    if length is not None and length > limit:
        raise errors.body_too_large(limit)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        # The size of a compressed body does not bound the cost of reading it.
        raise HttpError(415, "Compressed request bodies are not accepted.", code="unsupported_content_encoding")
    kind = headers.get(b"content-type", _JSON)
    if route.kind is Kind.INFERENCE and not kind.lower().startswith(_JSON):
        given = kind[:100].decode("ascii", "replace")
        message = f"Unsupported content type {given!r}: send -H 'content-type: application/json'."
        raise HttpError(415, message, code="unsupported_content_type")


def body_limit(route: Route, limits: Limits) -> int:
    """The size in bytes."""
    if route.kind is Kind.INFERENCE:
        return limits.inference_body_bytes
    if route.kind is Kind.LOGIN:
        return LOGIN_BODY_BYTES
    if route.kind is not Kind.CONTROL:
        return 0
    return limits.upload_body_bytes if route.upload else limits.control_body_bytes
