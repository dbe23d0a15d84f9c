"""Writes the response to one inference request: head, body, and an ending or error in the form still possible.

Rules: it truncates nothing silently. A stream that cannot continue ends with an error event; a plain body that cannot
is aborted, so that the client sees a failed transfer. Errors inside streams become OpenAI's object.
"""

from __future__ import annotations

import time
from typing import Final

import orjson

from appliance.gateway.access.request import Pairs, Request
from appliance.gateway.answers.usage import FINISHED, with_fingerprint, without_usage_event
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import INPUT_TOKENS, RESPONSES
from appliance.gateway.http import error_shapes, wire
from appliance.gateway.http.client import Client

SSE: Final = b"text/event-stream; charset=utf-8"
ERROR_EVENT: Final = b'data: {"error"'
_EVENT: Final = b'data: {"'
_USAGE: Final = b'"usage"'
# More bytes than the object with an answer's usage has.
_USAGE_BYTES: Final = 1024
# More bytes than an event with nothing but usage has. An event of 8 MiB (`echo`) that was kept until it was complete
# was joined anew with each packet, which took the loop a second, and all of it waited for a client that did not read.
_EVENT_BYTES: Final = 16 * 1024
_SSE_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Answer:
    """`client` is None once the client is gone or the response is finished."""

    # Defaults stand in the class, as access.request.Request says.
    head_sent: bool = False
    sse: bool = False
    _chunked: bool = False
    _tail: bytes = b""
    _partial: bytes = b""
    _before: bytes = b""
    _error_seen: bool = False
    _engine_failed: bool = False

    def __init__(self, client: Client, request: Request, *, hides_usage: bool) -> None:
        """hides_usage: the gateway requested a usage event that the client did not request."""
        self.client: Client | None = client
        self.request = request
        self._hides_usage = hides_usage
        # Answers of /v1/responses repeat texts of the request: their transcript reads the usage.
        route = request.route
        self._reads_usage = route is None or route.name not in (RESPONSES, INPUT_TOKENS)

    # -- beginning

    def begin_stream(self, version: bytes | None) -> None:
        self.sse = True
        self._head(SSE, None, version, (*_SSE_HEADERS, *self.request.answer_headers))

    def begin_body(self, content_type: bytes, length: int | None, version: bytes | None) -> None:
        self._head(content_type, length, version, tuple(self.request.answer_headers))

    def _head(self, content_type: bytes, length: int | None, version: bytes | None, extra: Pairs) -> None:
        client = self.client
        assert client is not None
        self.head_sent = True
        self._chunked = length is None and self.request.version == "1.1"
        self.request.status = 200
        client.write(
            wire.response_head(
                200,
                self.request.request_id,
                content_type=content_type,
                length=length,
                chunked=self._chunked,
                close=not client.will_keep_alive or (length is None and not self._chunked),
                version=version,
                processing_s=time.monotonic() - self.request.received_s,
                extra=extra,
            )
        )

    # -- middle

    def write(self, data: bytes) -> None:
        if data and self.client is not None:
            self.request.sent_bytes += len(data)
            self.client.write(wire.chunk(data) if self._chunked else data)

    def relay(self, body: bytes) -> None:
        """Bytes of the engine's answer."""
        if self.sse:
            body = self._stream_bytes(body)
        else:
            self._read_usage(body)
        client = self.client
        if body and client is not None:
            self.request.sent_bytes += len(body)
            client.write_event(wire.chunk(body) if self._chunked else body)

    def _stream_bytes(self, body: bytes, *, last: bool = False) -> bytes:
        if self._hides_usage and (self._partial or body[-2:] != b"\n\n"):
            # Only whole events can be removed, and only short ones are: the pieces of a longer one pass as they come.
            body = b"%b%b" % (self._partial, body)
            end = len(body) if last else body.rfind(b"\n\n") + 2
            if len(body) - end > _EVENT_BYTES:
                end = len(body)
            if end < 2:
                self._partial = body
                return b""
            body, self._partial = body[:end], body[end:]
        # `find`, as everywhere on hot paths: CPython's `in` first tries to convert the bytes to an integer, which takes
        # ten times as long.
        told = body.find(_USAGE) >= 0
        if self._before or body[-2:] != b"\n\n":
            self._read_usage(body)
        elif told and self._reads_usage:
            self.request.tokens.read(body)
        if told and self._hides_usage:
            body = without_usage_event(body)
        if self._hides_usage and body.find(FINISHED) >= 0:
            body = with_fingerprint(body, self.request.model_version)
        # Inside JSON text the quote would be escaped, so this counts events, whatever they contain.
        if body[: len(_EVENT)] == _EVENT and body.find(_EVENT, len(_EVENT)) < 0:
            events, error = 1, body[: len(ERROR_EVENT)] == ERROR_EVENT
        else:
            events, error = body.count(_EVENT), body.find(ERROR_EVENT) >= 0
        self.request.stream_events += events
        if error:
            self._engine_failed = self._engine_failed or _tells_of_failure(body)
            body = _rewritten_events(body, self.request, self.request.stream_events - 1)
            self._error_seen = True
        ending = self.request.route.stream_end  # type: ignore[union-attr]
        if ending is not None:
            seen = body if len(body) >= len(ending) else b"%b%b" % (self._tail, body)
            self._tail = seen[-len(ending) :]
        return body

    def _read_usage(self, body: bytes) -> None:
        """Reads the usage in an answer that is passed on in pieces, wherever they were cut."""
        if self._reads_usage:
            seen = b"%b%b" % (self._before, body)
            if seen.find(_USAGE) >= 0:
                self.request.tokens.read(seen)
            self._before = b"" if body[-2:] == b"\n\n" else seen[-_USAGE_BYTES:]

    # -- ending

    def whole(self, status: int, content_type: bytes, body: bytes, version: bytes | None, now_s: float) -> None:
        """Send a complete answer of which nothing has been sent yet."""
        client = self.client
        assert client is not None
        if self.head_sent:
            # Comments opened a stream, but the engine sent a plain answer: relay it inside the stream as its status
            # requires.
            self.write(b"data: %b\n\n" % body)
            self.end()
            return
        request = self.request
        request.status = status
        request.sent_bytes = len(body)
        if self._reads_usage:
            request.tokens.read(body)
            if request.asked.sequences > 1 and request.tokens.completion:
                request.tokens.read_choices(body)
        client.write(
            wire.whole_response(
                status,
                request.request_id,
                content_type,
                version,
                now_s - request.received_s,
                body,
                extra=request.answer_headers,
                close=not client.will_keep_alive,
            )
        )
        self.client = None
        client.finished(keep_alive=True, now_s=now_s)

    def ends_well(self, body: bytes) -> bool:
        """Whether the stream is complete once `body`, the last of it, is relayed.

        An HTTP message that ends without the stream's own ending is a truncation that no client would notice.
        """
        end = self.request.route.stream_end  # type: ignore[union-attr]
        if not self.sse or end is None or self._error_seen or body.find(ERROR_EVENT) >= 0:
            return True
        return (b"%b%b%b" % (self._tail, self._partial, body)).endswith(end)

    def engine_failed(self, body: bytes) -> bool | None:
        """Whether the stream has reported a failure of the engine once `body`, the last of it, is relayed. None: it
        reported a fault of the request, which says nothing about the engine's version; otherwise a client could have a
        canary rolled back, or promoted."""
        if self._engine_failed:
            return True
        if body.find(ERROR_EVENT) < 0:
            return None if self._error_seen else False
        return True if _tells_of_failure(body) else None

    def end(self, body: bytes = b"") -> None:
        client = self.client
        assert client is not None
        if self.sse and (body or self._partial):
            body = self._stream_bytes(body, last=True)
        elif not self.sse:
            self._read_usage(body)
        if self._chunked:
            self.request.sent_bytes += len(body)
            client.write(b"%b%b" % (wire.chunk(body) if body else b"", wire.LAST_CHUNK))
        else:
            self.write(body)
        self.client = None
        client.finished(keep_alive=self._chunked or not self.sse)

    def fail(self, error: HttpError) -> None:
        """Send the error to the client in the form still possible, and finish."""
        client, self.client = self.client, None
        if client is None:
            return
        if not self.head_sent:
            client.answer_error(error)
        elif self.sse:
            event = error_shapes.event(error, self.request, self.request.stream_events)
            if self._tail and not self._tail.endswith(b"\n\n"):
                event = b"\n\n%b" % event
            client.write(b"%b%b" % (wire.chunk(event), wire.LAST_CHUNK) if self._chunked else event)
            client.finished(keep_alive=False)
        else:
            client.abort_response()


def error_event_code(body: bytes) -> int | None:
    """Status inside the error event at the start of `body`, None if there is no error event."""
    line = body[6:].split(b"\n", 1)[0]
    try:
        return errors.event_code(orjson.loads(line))
    except orjson.JSONDecodeError:
        return None


def event_error(body: bytes) -> HttpError:
    line = body[6:].split(b"\n", 1)[0]
    return errors.from_upstream(error_event_code(body) or 500, line)


def _tells_of_failure(body: bytes) -> bool:
    for line in body.split(b"\n"):
        if line.startswith(ERROR_EVENT) and (error_event_code(line) or 0) >= 500:
            return True
    return False


def _rewritten_events(body: bytes, request: Request, sent: int) -> bytes:
    """The same events with vLLM's error objects converted to the route's. sent: how many events were before them."""
    lines = body.split(b"\n")
    for i, line in enumerate(lines):
        if line.startswith(ERROR_EVENT) and error_event_code(line) is not None:
            lines[i] = error_shapes.event(event_error(line), request, sent).removesuffix(b"\n\n")
    return b"\n".join(lines)
