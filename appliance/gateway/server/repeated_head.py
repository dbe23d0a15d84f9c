"""Reuses the parsed head if a connection's next request differs only in the length of its body. Pure.

Clients keep connections open and repeat the same headers. A head that equals a parsed and admitted one, byte for byte
except the digits of its Content-Length, means the same; parsing it again would be half of a request's cost here.
"""

from __future__ import annotations

import re
from typing import Final

from appliance.gateway.access.request import Request
from appliance.gateway.core.routes import Kind
from appliance.gateway.http.known_head import KnownHead

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n", re.IGNORECASE)


class RepeatedHead(KnownHead):
    """A parsed, admitted request without body or id, and the bytes around the digits of its length.

    table: which routing table it was admitted under.
    """

    def __init__(self, before: bytes, after: bytes, request: Request, table: int) -> None:
        super().__init__(before, after)
        self.request = request
        self.table = table

    def again(self, body: bytes) -> Request:
        """A new request with this head and body, admitted like the first; the caller sets its id and time."""
        seen = self.request
        request = Request(seen.method, seen.target, seen.headers, seen.version, seen.path)
        request.keep_alive = seen.keep_alive
        request.route = seen.route
        request.caller = seen.caller
        request.use = seen.use
        request.content_length = request.body_bytes = len(body)
        request.chunks = [body]
        request.complete = True
        return request


def repeated_head(data: bytes, request: Request, table: int) -> RepeatedHead | None:
    """What to remember of a request parsed from exactly `data`; None if it is not worth it."""
    route = request.route
    if route is None or route.kind is not Kind.INFERENCE or request.refusal is not None or request.caller is None:
        return None
    if request.more_headers or request.session or request.caller.expires_s is not None:
        return None  # they name the request; a login and such a key end by the clock
    if request.content_length is None or b"expect" in request.headers or b"x-request-id" in request.headers:
        return None
    end = data.find(b"\r\n\r\n") + 4
    found = _LENGTH.search(data, 0, end)
    if found is None or len(data) - end != request.content_length:
        return None
    return RepeatedHead(data[: found.start(1)], data[found.end(1) : end], request, table)
