"""One client's connection: uvicorn's HTTP/1.1 protocol, and what it leaves open: the size and the time of a head,
headers that two parsers could read differently, and refusals in the API's own shape."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.server.exchange import LINGER_S, error_response
from appliance.gateway.server.state import State

# With two of them two parsers could disagree.
_ONCE: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"}
)


class Connection(HttpToolsProtocol):
    """running: the cycle of the request being answered, or answered last; `cycle` is uvicorn's name for the last one
    parsed. refusal: why its bytes are not read any more. private: it came by the private socket."""

    def __init__(self, config: Config, server_state: ServerState, state: State, *, private: bool = False) -> None:
        super().__init__(config, server_state, {})
        self.state, self.private = state, private
        self.running: Any = None
        self.refusal: HttpError | None = None
        self._task: asyncio.Task[None] | None = None
        self._head_since_s: float | None = time.monotonic()
        self._unparsed_bytes = 0
        self._in_head, self._offers_upgrade = True, False

    # -- life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.state.limits.max_connections:
            self._refuse(errors.unavailable("Too many open connections.", "too_many_connections", 2))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        if self.running is not None:
            self.running.disconnected = True
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def eof_received(self) -> None:
        """A client that closes its half counts as gone: an engine would compute for one that may not read."""
        self._close()

    def _close(self) -> None:
        """End the connection once the client has read what is on its way, or after a while."""
        self.transport.close()
        self.loop.call_later(self.state.limits.write_stall_s, self.transport.abort)

    def abort(self) -> None:
        """End the connection at once, so that what was cut off cannot be taken for a whole answer."""
        if self.running is not None:
            self.running.disconnected = True
        self.transport.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running, self._task = cycle, self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(self._task)
        self._task.add_done_callback(self.tasks.discard)

    def write_whole(self, data: bytes) -> None:
        """Write a whole response past uvicorn, which has to be told only of its end."""
        running = self.running
        if not running.disconnected:
            running.response_started, running.waiting_for_100_continue, running.chunked_encoding = True, False, False
            self.transport.write(data)

    # -- bytes

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._in_head and self._head_since_s is None and (self.running is None or self.running.response_complete):
            self._head_since_s = time.monotonic()
        self._unparsed_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as offer:
                    data = self._without_offer(data[offer.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, HttpError):
                raise
            self._refuse(error.__context__)
        except httptools.HttpParserError as error:
            self._refuse(errors.protocol_error(f"The request is not well-formed HTTP/1.1: {error}."))
        else:
            # Neither a name without end, nor a trailer or an extension of a chunk.
            if self._unparsed_bytes > self.state.limits.head_bytes:
                status = 431 if self._in_head else 400
                self._refuse(errors.protocol_error("The request has too many bytes besides its body.", status))

    def _without_offer(self, rest: bytes) -> bytes:
        """The head without its offer of another protocol, which a server may ignore (RFC 9110, 7.8), and what followed
        it, for a new parser: httptools reads no body after an offer, and Java's client and `curl --http2` make one with
        each request."""
        line = b"%b %b HTTP/%b" % (self.scope["method"].encode(), self.url, self.scope["http_version"].encode())
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._offers_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((line, *lines, b"", rest))

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        if self.state.stopping:
            raise errors.unavailable("The server is shutting down.", "shutting_down", 2)
        super().on_message_begin()
        self._in_head = True
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed_bytes, self._head_since_s = False, 0, None
        version, method, headers = self.parser.get_http_version(), self.parser.get_method(), dict(self.headers)
        self.scope["method"], self.scope["http_version"] = method.decode(), version
        coding = headers.get(b"transfer-encoding")
        if len(self.url) + sum(len(n) + len(value) + 4 for n, value in self.headers) > self.state.limits.head_bytes:
            raise errors.protocol_error("The URL and the headers of the request are too long.", 431)
        if sum(name in _ONCE for name, _ in self.headers) > len(_ONCE & headers.keys()):
            raise errors.protocol_error("A header was sent twice that a request has once.")
        if method == b"CONNECT":
            raise errors.protocol_error("CONNECT is not supported.")
        if version not in ("1.0", "1.1"):
            raise errors.protocol_error(f"HTTP/{version} is not supported, use HTTP/1.1.", 505)
        if version == "1.0" and coding is not None:
            raise errors.protocol_error("Transfer-Encoding is not part of HTTP/1.0.")
        if version == "1.1" and b"host" not in headers:
            raise errors.protocol_error("The request has no Host header.")
        if coding is not None and coding.lower() != b"chunked":
            raise errors.protocol_error("Only Transfer-Encoding: chunked is understood.", 501)
        if self.parser.should_upgrade():
            self._offers_upgrade = True
            return
        self.scope["target"] = self.url  # type: ignore[typeddict-unknown-key]
        # uvicorn takes the URL apart and decodes it; routes go by its bytes, which are checked there.
        self.url = b"/"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if not self._offers_upgrade:
            self._in_head = True
            super().on_message_complete()

    # -- refusals

    def _refuse(self, error: HttpError) -> None:
        """Answer an error to bytes that are no request, and close. Behind a request that is being answered nothing more
        is read; if its own body is bad, the error is its answer."""
        self.parser, self.refusal, error.close = None, error, True  # type: ignore[assignment]
        self._head_since_s = None
        if self.running is not None and not self.running.response_complete:
            self.running.keep_alive = False
            self.cycle.message_event.set()
            return
        self.state.metrics.requests("unknown", error.status).inc()
        self.transport.write(error_response(error, self.state.new_request_id()))
        # Closed with unread bytes, the connection is reset, which can destroy the answer on its way.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self._close)

    def end_if_late(self, now_s: float) -> None:
        """End a connection whose head takes too long. now_s: the monotonic clock."""
        if self._head_since_s is None or now_s - self._head_since_s < self.state.limits.head_timeout_s:
            return
        self._head_since_s = None
        if not self._unparsed_bytes:
            self._close()  # it has said nothing
        else:
            self._refuse(HttpError(408, "The request head came too slowly.", code="request_timeout", close=True))
