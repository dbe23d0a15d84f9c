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


class RelayedStream:
    """hides_usage: the gateway asked for an event with the usage that the client did not ask for. has_error: the engine
    reported an error in it."""

    def __init__(self, request: Request, *, hides_usage: bool) -> None:
        self.has_error = False
        self._request = request
        self._hides_usage = hides_usage
        # Answers of /v1/responses repeat the request, whose tools may have any text: their transcript reads the usage.
        self._reads_usage = request.route.name not in (RESPONSES, INPUT_TOKENS)
        self._tail = self._partial = b""
        self._ended = False

    def take(self, body: bytes, *, last: bool = False) -> bytes:
        """The bytes for the client: whole events only, until the last."""
        body = self._partial + body
        end = len(body) if last else body.rfind(b"\n\n") + 2
        if end < 2:
            self._partial = body
            return b""
        body, self._partial = body[:end], body[end:]
        self.read_usage(body)
        self._ended = self._ended or _LAST_EVENT.search(body) is not None
        if self._hides_usage and (_USAGE in body or FINISHED in body):
            body = without_usage(body, self._request.model_version)
        # Inside JSON text the quote would be escaped, so this counts events, whatever they contain.
        self._request.stream_events += body.count(_EVENT)
        return self._with_errors(body) if ERROR_EVENT in body else body

    def read_usage(self, body: bytes) -> None:
        """Read the usage in an answer that comes in pieces, wherever they were cut."""
        seen = self._tail + body
        if self._reads_usage and _USAGE in seen:
            self._request.tokens.read(seen)
        self._tail = seen[-_USAGE_BYTES:]

    def ended_well(self) -> bool:
        """Whether all of it was there. An HTTP message that ends without its stream's own ending is a truncation that
        no client would notice."""
        return self._ended or self.has_error

    def _with_errors(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for i, line in enumerate(lines):
            if line.startswith(ERROR_EVENT) and (error := event_error(line)) is not None:
                self.has_error = True
                shaped = error_shapes.event(error, self._request, self._request.stream_events - 1)
                lines[i] = shaped.removesuffix(b"\n\n")
        return b"\n".join(lines)


def event_error(body: bytes) -> HttpError | None:
    """The error in the event at the start of `body`; None if it is no error event. Of a failure of its own an engine
    says nothing that a client could use."""
    line = body[6:].split(b"\n", 1)[0]
    try:
        code = errors.event_code(orjson.loads(line))
    except orjson.JSONDecodeError:
        return None
    if code is None:
        return None
    return errors.engine_failed() if code >= 500 else errors.from_upstream(code, line)
