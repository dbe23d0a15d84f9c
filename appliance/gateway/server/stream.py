"""Reads the events of an engine's stream, each once, and rewrites the few that must be.

A greedy stream's events lose their token ids, a stored answer's are noted, the usage is read and taken out where the
client did not ask for it, errors get the API's shape. All others pass unchanged.
"""

from __future__ import annotations

from typing import Final

import orjson

from appliance.gateway.access.request import USAGE, Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import INPUT_TOKENS, RESPONSES
from appliance.gateway.requests.request_check import Checked
from appliance.gateway.server.exchange import error_event

ERROR_EVENT: Final = b'data: {"error"'
_EVENT: Final = b'data: {"'
_FINISHED: Final = b'"finish_reason":"'
_NO_CHOICES: Final = b'"choices":[],'
_LAST: Final = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
# More bytes than the object with an answer's usage has.
_USAGE_BYTES: Final = 1024


class Stream:
    """One answer on its way. ended: whether all of it was there; an HTTP message that ends without its stream's own
    ending is a truncation that no client would notice. has_error: the engine reported an error in it."""

    def __init__(self, request: Request, checked: Checked, *, hides_usage: bool, most_bytes: int) -> None:
        """hides_usage: the client did not ask for the event that has it. most_bytes: of an answer that is stored."""
        self.ended = self.has_error = False
        self._request, self._hides_usage, self._most_bytes = request, hides_usage, most_bytes
        self._continuation, self._transcript = checked.continuation, checked.transcript
        self._partial = self._tail = b""

    def begin(self) -> None:
        """An engine begins to answer: what another one left unfinished is gone."""
        self._partial = b""

    def events(self, data: bytes) -> list[bytes]:
        """The whole events of an engine's bytes, as it wrote them; the beginning of another one is kept."""
        *events, self._partial = (self._partial + data).split(b"\n\n")
        return events

    def rewrite(self, event: bytes) -> bytes:
        """An engine's event as the client gets it, empty for none."""
        return self.rewrite_continued(event if self._continuation is None else self._continuation.event(event))

    def rewrite_continued(self, event: bytes) -> bytes:
        """The same for one that the continuation has seen, or made."""
        if not event:
            return b""
        request, transcript = self._request, self._transcript
        if transcript is not None:
            if max(len(event), transcript.held) > self._most_bytes:
                transcript.stores = False
            event = transcript.event(event)
        self._read_usage(event)
        if self._hides_usage and _FINISHED in event:
            # An engine writes it into the event with the usage if it is asked for usage, else into these.
            event = b'%b,"system_fingerprint":%b}' % (event[:-1], orjson.dumps(request.model_version))
        elif self._hides_usage and _NO_CHOICES in event:
            return b""
        if event.startswith(_LAST):
            self.ended = True
        # Inside JSON text the quote would be escaped, so this counts events, whatever they contain.
        request.stream_events += _EVENT in event
        if ERROR_EVENT in event and (error := event_error(event)) is not None:
            self.ended = self.has_error = True
            return error_event(error, request, request.stream_events - 1)
        return event + b"\n\n"

    def read_whole(self, body: bytes) -> None:
        """Read the usage in a plain answer, or in a piece of one, wherever it was cut."""
        seen = self._tail + body
        self._read_usage(seen)
        self._tail = seen[-_USAGE_BYTES:]

    def _read_usage(self, body: bytes) -> None:
        """Answers of /v1/responses repeat the request, whose tools may have any text: their transcript has it."""
        if self._request.route.name in (RESPONSES, INPUT_TOKENS):
            body = b"" if self._transcript is None else self._transcript.usage
        if USAGE in body:
            self._request.tokens.read(body)


def event_error(event: bytes) -> HttpError | None:
    """The error in an event with ERROR_EVENT; None if it is none."""
    return errors.from_event(event[event.index(ERROR_EVENT) + 6 :].split(b"\n", 1)[0])
