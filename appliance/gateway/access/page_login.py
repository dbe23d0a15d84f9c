"""Logins of the box's own page: who a request without a key comes from, by a cookie and the page's header. Pure.

The token has two halves. One is a cookie that no script reads; browsers send it to every port of a host, and for what
other pages of that host ask, too. The other is kept by the page's own origin, and comes in a header that a form, an
image or a link cannot have. Only both together name a login, on the routes that the page uses, for what the page itself
has asked.
"""

from __future__ import annotations

import hashlib
from typing import Final

from appliance.gateway.access.request import Headers, Pairs, Request
from appliance.gateway.core import errors

PAGE_HEADER: Final = b"x-appliance-page"
# From the controller: `ID=HALF; Max-Age=…`, which clients get as cookies.
COOKIE_HEADER: Final = b"x-appliance-cookie"
COOKIE_PATHS: Final = (b"/admin/v1", b"/v1")
_READS: Final = frozenset({b"GET", b"HEAD"})


def login_digest(request: Request) -> str:
    """The SHA-256 of the login's token, as in the table. Raises HttpError 401 without the page's header or its cookie,
    403 for a route that is not the page's and for what another page has asked."""
    headers, route = request.headers, request.route
    told = headers.get(PAGE_HEADER)
    if told is None:
        raise errors.missing_key()
    if route is None or not route.page:
        raise errors.not_for_logins()
    if not _asked_by_the_page(request.method, headers):
        raise errors.other_page()
    name, _, half = told.partition(b".")
    cookie = _cookie(headers.get(b"cookie", b""), name)
    if not name or not half or not cookie:
        raise errors.session_ended()
    return hashlib.sha256(b"%b.%b" % (cookie, half)).hexdigest()


def check_asked_by_the_page(request: Request) -> None:
    """Raises HttpError 403 for what another page has asked."""
    if not _asked_by_the_page(request.method, request.headers):
        raise errors.other_page()


def _asked_by_the_page(method: bytes, headers: Headers) -> bool:
    """Browsers say where a request comes from (https://www.w3.org/TR/fetch-metadata/), but over plain HTTP only to this
    machine; elsewhere the origin header says it, except for reads."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site == b"same-origin"
    if origin is not None:
        return origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
    return method in _READS


def _cookie(given: bytes, name: bytes) -> bytes:
    for one in given.split(b";"):
        found, _, value = one.partition(b"=")
        if found.strip() == name:
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
