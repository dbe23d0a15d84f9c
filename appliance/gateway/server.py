"""Server side: one client connection. Parses requests, refuses bad ones, hands good ones to a handler.

States of a connection: idle (no request) → head → [body] → answering → idle …, or → lingering → closed.
Invariants: at most one request is being answered; a connection whose bytes could not be parsed never carries
another request; the gateway's count of buffered body bytes includes exactly the bodies of unfinished requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import httptools

from . import errors, wire
from .error_shapes import shaped
from .errors import ApiError
from .outbox import Writer
from .repeated_head import RepeatedHead, repeated_head
from .routes import Kind, resolve
from .wire import Request

if TYPE_CHECKING:
    from .gateway import Gateway

log = logging.getLogger("appliance.gateway")

# A header that may stand once only: two of them mean that two readers could disagree.
_ONCE: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"}
)
# Body of a refused request that is read to its end, to keep the connection; a larger one costs the connection.
_DISCARD_BYTES: Final = 256 * 1024
_LINGER_S: Final = 2.0
# A connection whose heads differ so often in a row does without remembering them.
_DIFFERING_HEADS: Final = 4
_LINGER_BYTES: Final = 4 * 1024 * 1024


class _Closing(Exception):
    """Raised into the parser: bytes after a response that ends the connection are not looked at."""


class Handler(Protocol):
    """Answers one request. Calls `ClientConnection.finished` exactly once unless `client_lost` came first."""

    def start(self) -> None: ...
    def body(self, data: bytes) -> None: ...
    def body_end(self) -> None: ...
    def client_lost(self) -> None: ...
    def client_paused(self, paused: bool) -> None: ...
    def cancel(self, error: ApiError) -> None: ...
    def tick(self, now_s: float) -> None: ...


class ClientConnection(Writer):
    """See the module's docstring."""

    write_paused: bool = False
    active_request: Request | None = None
    _parsing: Request | None = None
    _url: bytes = b""
    _header_count: int = 0
    _head_bytes: int = 0
    _unparsed_head: int = 0
    _in_head: bool = True
    _deadline_s: float = 0.0
    _stalled_since_s: float = 0.0
    _closing: bool = False
    _head_started: bool = False
    _linger_bytes: int = 0
    _read_paused: bool = False
    _window_start_s: float = 0.0
    _window_bytes: int = 0
    _between: bool = True
    _fed: bytes | None = None
    _repeat: RepeatedHead | None = None
    _differing: int = 0

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.outbox)
        self.gateway = gateway
        self.active: Handler | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._waiting: deque[Request | ApiError] = deque()
        self._headers: dict[bytes, bytes] = {}

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        gateway = self.gateway
        self._deadline_s = time.monotonic() + gateway.limits.head_timeout_s
        full = len(gateway.connections) >= gateway.limits.max_connections
        gateway.connections.add(self)
        if full:
            gateway.metrics.events["connection_refused"] += 1
            self._refuse(errors.unavailable("Too many open connections.", "too_many_connections", 2))

    def data_received(self, data: bytes) -> None:
        if self._closing or self._parser is None:
            self._linger_bytes += len(data)
            if self._linger_bytes > _LINGER_BYTES:
                self.abort()
            return
        between, self._between = self._between, False
        if between and self._differing < _DIFFERING_HEADS:
            if self._repeat is not None and self._repeated(self._repeat, data):
                return
            self._fed = data
        else:
            self._fed = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(errors.protocol_error("CONNECT and protocol upgrades are not supported."))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, _Closing):
                return
            if not isinstance(cause, ApiError):
                raise
            self._refuse(cause)
        except httptools.HttpParserError as error:
            self.gateway.metrics.events["bad_http"] += 1
            self._refuse(errors.protocol_error(f"The request is not well-formed HTTP/1.1: {error}."))
        else:
            if self._in_head:
                # Bytes of a head that httptools has not reported yet are held by its parser.
                self._unparsed_head += len(data)
                if self._unparsed_head > self.gateway.limits.head_bytes + len(data):
                    self._refuse(errors.protocol_error("The request head is too large.", 431))

    def _repeated(self, repeat: RepeatedHead, data: bytes) -> bool:
        """Begin a request whose head is known. False: the parser must look at these bytes."""
        gateway = self.gateway
        # With a new table its key may be revoked, or may do something else.
        if self.active is not None or gateway.stopping or repeat.table != gateway.tables_applied:
            return False
        body = repeat.body_of(data)
        if body is None:
            self._differing += 1
            return False
        if len(body) > gateway.limits.inference_body_bytes:
            return False
        request = repeat.again(body)
        try:
            gateway.take_body(request, len(body))
        except ApiError:
            return False
        self._differing = 0
        self._between = True
        request.request_id = gateway.new_request_id()
        self._begin(request)
        return True

    def eof_received(self) -> bool:
        # Half-closed clients are treated as gone: waiting would keep an engine busy for nobody.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._parser = None
        self.gateway.connections.discard(self)
        handler, request = self.active, self.active_request
        self.active = self.active_request = None
        if handler is not None and request is not None:
            handler.client_lost()
            request.status = request.status or 499
            self.gateway.metrics.events["client_disconnected"] += 1
            self.gateway.finished(request, time.monotonic())
        for waiting in self._waiting:
            if isinstance(waiting, Request):
                self.gateway.release_body(waiting)
        self._waiting.clear()
        if self._parsing is not None and self._parsing is not request:
            self.gateway.release_body(self._parsing)
        self._parsing = None

    def pause_writing(self) -> None:
        self.write_paused = True
        self._stalled_since_s = time.monotonic()
        if self.active is not None:
            self.active.client_paused(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.active is not None:
            self.active.client_paused(False)

    # -- httptools callbacks; an ApiError raised here ends the connection after it is answered

    def on_message_begin(self) -> None:
        if self._closing:
            raise _Closing
        if self.gateway.stopping:
            raise errors.unavailable("The server is shutting down.", "shutting_down", 2)
        self._head_started = True
        self._between = False
        self._url = b""
        self._headers = {}
        self._header_count = self._head_bytes = self._unparsed_head = 0
        self._in_head = True
        if self.active is None:
            self._deadline_s = time.monotonic() + self.gateway.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self.gateway.limits.target_bytes:
            raise errors.protocol_error("The request URL is too long.", 414)

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self.gateway.limits
        self._header_count += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > limits.head_bytes or self._header_count > limits.header_count:
            raise errors.protocol_error("The request has too many or too large headers.", 431)
        if not self._in_head:
            return  # trailers: counted, and dropped
        name = name.lower()
        headers = self._headers
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            raise errors.protocol_error(f"The header {name.decode('latin-1')} was sent twice.")
        else:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self._in_head = self._head_started = False
        if parser.should_upgrade():
            raise errors.protocol_error("CONNECT and protocol upgrades are not supported.")
        headers = self._headers
        request = Request(parser.get_method(), self._url, headers, parser.get_http_version())
        self._parsing = request
        length = headers.get(b"content-length")
        if length is not None:
            request.content_length = int(length)
        if request.version != "1.1":
            self._check_version(request)
        elif b"host" not in headers:
            raise errors.protocol_error("The request has no Host header.")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked":
                raise errors.protocol_error("Only Transfer-Encoding: chunked is understood.", 501)
            request.chunked = True
        request.keep_alive = parser.should_keep_alive()
        now = time.monotonic()
        request.received_s = now
        self._window_start_s, self._window_bytes = now, 0
        try:
            request.request_id = self.gateway.request_id(headers)
            request.route = resolve(request.method, request.path)
            self.gateway.admit(request)
        except ApiError as error:
            request.refusal = error
        if self.active is not None:
            # Pipelining: answered in order, and nothing more is read until its turn.
            if len(self._waiting) >= self.gateway.limits.pipelined_requests:
                raise errors.protocol_error("Too many pipelined requests.")
            self.pause_reading()
        else:
            self._head_ready(request)

    def _head_ready(self, request: Request) -> None:
        """Its head is known and it is its turn. Raises the request's ApiError if its body is not worth reading."""
        expects = request.headers.get(b"expect")
        if request.refusal is not None:
            if expects is not None or request.chunked or (request.content_length or 0) > _DISCARD_BYTES:
                raise request.refusal
            return
        if expects is not None:
            self.write(wire.CONTINUE)
        if not request.buffered:
            self._begin(request)

    def _check_version(self, request: Request) -> None:
        if request.version != "1.0":
            raise errors.protocol_error(f"HTTP/{request.version} is not supported, use HTTP/1.1.", 505)
        if b"transfer-encoding" in request.headers:
            raise errors.protocol_error("Transfer-Encoding is not part of HTTP/1.0.")

    def on_body(self, data: bytes) -> None:
        request = self._parsing
        if request is None:
            return  # answered and closing
        length = len(data)
        request.body_bytes += length
        self._window_bytes += length
        if request.refusal is not None:
            if request.body_bytes > _DISCARD_BYTES:
                raise request.refusal
            request.body_bytes = 0
            return
        limit = self.gateway.body_limit(request)
        if request.body_bytes > limit:
            raise errors.body_too_large(limit)
        if request.buffered:
            self.gateway.take_body(request, length)
            request.chunks.append(data)
        elif request is self.active_request and self.active is not None:
            self.active.body(data)
        else:
            request.chunks.append(data)

    def on_message_complete(self) -> None:
        request = self._parsing
        if request is None:
            return
        self._parsing = None
        self._in_head = self._between = True
        self._unparsed_head = 0
        request.complete = True
        if self._fed is not None:
            self._repeat = repeated_head(self._fed, request, self.gateway.tables_applied)
        if request is self.active_request:
            if self.active is not None:
                self.active.body_end()
        elif self.active is not None:
            self._waiting.append(request)
        else:
            self._begin(request)

    # -- answering

    def _begin(self, request: Request) -> None:
        self.active_request = request
        if request.refusal is not None:
            self.answer_error(request.refusal)
            return
        assert request.route is not None
        if request.route.kind is not Kind.HEALTH:
            request.received_s = time.monotonic()
            try:
                self.active = self.gateway.handler(self, request)
            except ApiError as error:
                self.answer_error(error)
                return
            self.active.start()
            if not request.buffered:
                self._pass_on_body(request)
        else:
            status, content_type, body = self.gateway.own_answer(request)
            self.answer(status, content_type, body)

    def answer(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send a whole response of the gateway's own and finish the active request."""
        request = self.active_request
        assert request is not None
        request.status = status
        head = wire.response_head(
            status, request.request_id, content_type=content_type, length=len(body), close=not self.will_keep_alive
        )
        self.write(head + body)
        self.finished(keep_alive=True)

    def answer_error(self, error: ApiError) -> None:
        """Send an error as the whole response and finish the active request."""
        request = self.active_request
        assert request is not None
        close = error.close or not self.will_keep_alive
        data = self._error_bytes(error, request, request.request_id, close=close)
        if request.method == b"HEAD":
            data = data[: data.index(b"\r\n\r\n") + 4]
        self.write(data)
        self.finished(keep_alive=not error.close)

    def abort_response(self) -> None:
        """Break off a response that cannot be completed: the client sees a failed transfer, not a short one."""
        request = self.active_request
        assert request is not None
        self.active = self.active_request = None
        self.gateway.metrics.events["response_aborted"] += 1
        self.gateway.finished(request, time.monotonic())
        self.abort()

    @property
    def will_keep_alive(self) -> bool:
        request = self.active_request
        return request is not None and request.keep_alive and request.complete and not self.gateway.stopping

    def finished(self, *, keep_alive: bool, now_s: float = 0.0) -> None:
        """The active request's response is completely written. now_s: the monotonic clock, where it was just read."""
        request = self.active_request
        assert request is not None
        now_s = now_s or time.monotonic()
        reusable = keep_alive and self.will_keep_alive
        self.active = self.active_request = None
        self.gateway.finished(request, now_s)
        if not reusable:
            self._close(read_rest=not request.complete)
        elif self._waiting:
            waiting = self._waiting.popleft()
            if isinstance(waiting, ApiError):
                self._refuse(waiting)
            else:
                self._begin(waiting)
        else:
            self._next_idle(now_s)

    def _pass_on_body(self, request: Request) -> None:
        """What of a streamed body arrived before its turn (pipelining)."""
        chunks, request.chunks = request.chunks, []
        for data in chunks:
            if self.active is not None and self.active_request is request:
                self.active.body(data)
        if request.complete and self.active is not None and self.active_request is request:
            self.active.body_end()

    def _next_idle(self, now_s: float) -> None:
        self._deadline_s = now_s + self.gateway.limits.keepalive_s
        if self._parsing is not None:
            # Its head came while another request was answered; its turn is now.
            try:
                self._head_ready(self._parsing)
            except ApiError as error:
                self._refuse(error)
                return
        if self._read_paused:
            self.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Answer an error and close; behind a request that is still being answered, after it."""
        error.close = True
        if self.active is not None:
            request = self.active_request
            if self._parsing is request and request is not None:
                # The body of the request being answered is bad: its handler cannot go on.
                self.active.cancel(error)
            else:
                self._waiting.append(error)
                if self._parsing is not None:
                    self.gateway.release_body(self._parsing)
                    self._parsing = None
            self._parser = None
            return
        request = self._parsing
        self._parser = None
        request_id = request.request_id if request is not None else b""
        data = self._error_bytes(error, request, request_id or self.gateway.new_request_id(), close=True)
        if request is not None:
            self._parsing = None
            self.gateway.finished(request, time.monotonic())
        else:
            self.gateway.metrics.requests["unknown", error.status] += 1
        self.write(data)
        self._close(read_rest=True)

    @staticmethod
    def _error_bytes(error: ApiError, request: Request | None, request_id: bytes, *, close: bool) -> bytes:
        status, body, headers = shaped(error, request, request_id)
        if request is not None:
            request.status = status
            headers += request.rate_headers
        head = wire.response_head(
            status,
            request_id,
            content_type=b"application/json",
            length=len(body),
            close=close,
            extra=[*wire.error_headers(error), *headers],
        )
        return head + body

    def _close(self, *, read_rest: bool) -> None:
        transport = self.transport
        self._closing = True
        if self._parsing is not None:
            self.gateway.release_body(self._parsing)
            self._parsing = None
        if transport is None:
            return
        if not read_rest or not transport.can_write_eof():
            self._deadline_s = time.monotonic() + self.gateway.limits.write_stall_s
            self.close()
            return
        # Closing with unread bytes sends a reset that can destroy the answer on its way: say EOF, read on a little.
        self._deadline_s = time.monotonic() + _LINGER_S
        self.flush()
        transport.write_eof()
        self.resume_reading()

    def pause_reading(self) -> None:
        if self.transport is not None and not self._read_paused and not self.transport.is_closing():
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and self._read_paused:
            self._read_paused = False
            self._window_start_s, self._window_bytes = time.monotonic(), 0
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # -- time

    def tick(self, now_s: float) -> None:
        """Called a few times a second: everything here that depends on time."""
        limits = self.gateway.limits
        if self.write_paused and now_s - self._stalled_since_s > limits.write_stall_s:
            self.gateway.metrics.events["client_stalled"] += 1
            self.abort()
            return
        if self._closing:
            if now_s > self._deadline_s:
                self.abort()
            return
        parsing = self._parsing
        if parsing is not None and not self._read_paused:
            if now_s - self._window_start_s > limits.body_window_s:
                if self._window_bytes < limits.body_window_bytes:
                    self.gateway.metrics.events["slow_body"] += 1
                    self._refuse(ApiError(408, "The request body came too slowly.", code="request_timeout", close=True))
                    return
                self._window_start_s, self._window_bytes = now_s, 0
        if self.active is not None:
            self.active.tick(now_s)
        elif parsing is None and now_s > self._deadline_s:
            if self._head_started:
                self.gateway.metrics.events["slow_head"] += 1
                self._refuse(ApiError(408, "The request head came too slowly.", code="request_timeout", close=True))
            else:
                self.close()

    def stop(self) -> None:
        """The gateway stops: idle connections close now, others after their answer."""
        if self.active is None and self._parsing is None:
            self.close()
