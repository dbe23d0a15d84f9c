"""Reads the events of an engine's stream on their way to the client, and rewrites the few that must be.

It takes the usage out of an event that the client did not ask for, gives errors the API's shape, counts events, and
tells whether a stream has ended as its route's streams do. All other bytes pass unchanged.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from appliance.gateway.access.request import Request
from appliance.gateway.answers.usage import FINISHED, without_usage
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import INPUT_TOKENS, RESPONSES
from appliance.gateway.http import error_shapes

ERROR_EVENT: Final = b'data: {"error"'
_EVENT: Final = b'data: {"'
_USAGE: Final = b'"usage"'
_LAST_EVENT: Final = re.compile(
    rb"^(?:data: \[DONE\]|event: (?:message_stop|response\.(?:completed|incomplete|failed)))$", re.MULTILINE
)
# More bytes than the object with an answer's usage has.
_USAGE_BYTES: Final = 1024
# Longer events pass in pieces: nothing that is removed is as long.
_EVENT_BYTES: Final = 16 * 1024


class RelayedStream:
    """hides_usage: the gateway asked for an event with the usage that the client did not ask for. engine_failed: the
    engine reported a failure of its own; request_failed: a fault of the request, which says nothing about its version.
    """

    def __init__(self, request: Request, *, hides_usage: bool) -> None:
        self.engine_failed = self.request_failed = False
        self._request = request
        self._hides_usage = hides_usage
        # Answers of /v1/responses repeat the request, whose tools may have any text: their transcript reads the usage.
        self._reads_usage = request.route.name not in (RESPONSES, INPUT_TOKENS)
        self._partial = self._before = b""
        self._ended = False

    def take(self, body: bytes, *, last: bool = False) -> bytes:
        """The bytes for the client: whole events only, but for long ones."""
        if self._partial or body[-2:] != b"\n\n":
            body, self._partial = self._partial + body, b""
            end = len(body) if last else body.rfind(b"\n\n") + 2
            if len(body) - end > _EVENT_BYTES:
                end = len(body)
            if end < 2:
                self._partial = body
                return b""
            body, self._partial = body[:end], body[end:]
        told = _USAGE in body
        self.read_usage(body)
        if self._hides_usage and (told or FINISHED in body):
            body = without_usage(body, self._request.model_version)
        # Inside JSON text the quote would be escaped, so this counts events, whatever they contain.
        self._request.stream_events += body.count(_EVENT)
        if ERROR_EVENT in body:
            body = self._with_errors(body)
        self._ended = self._ended or _LAST_EVENT.search(body) is not None
        return body

    def read_usage(self, body: bytes) -> None:
        """Reads the usage in an answer that comes in pieces, wherever they were cut."""
        if self._reads_usage:
            seen = self._before + body if self._before else body
            if _USAGE in seen:
                self._request.tokens.read(seen)
            self._before = b"" if body[-2:] == b"\n\n" else seen[-_USAGE_BYTES:]

    def ended_well(self) -> bool:
        """Whether all of it was there. An HTTP message that ends without its stream's own ending is a truncation that
        no client would notice."""
        return self._ended or self.engine_failed or self.request_failed

    def _with_errors(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for i, line in enumerate(lines):
            if line.startswith(ERROR_EVENT) and (error := event_error(line)) is not None:
                self.engine_failed = self.engine_failed or error.status >= 500
                self.request_failed = self.request_failed or error.status < 500
                shaped = error_shapes.event(error, self._request, self._request.stream_events - 1)
                lines[i] = shaped.removesuffix(b"\n\n")
        return b"\n".join(lines)


def event_error(body: bytes) -> HttpError | None:
    """The error in the event at the start of `body`; None if it is no error event."""
    line = body[6:].split(b"\n", 1)[0]
    try:
        code = errors.event_code(orjson.loads(line))
    except orjson.JSONDecodeError:
        return None
    return None if code is None else errors.from_upstream(code, line)
