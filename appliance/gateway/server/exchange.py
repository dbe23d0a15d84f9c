"""A client's connection, and the exchange of one request and its answer on it; both bodies are streamed.

The connection extends uvicorn's: it limits the size and the time of a head, refuses headers that two parsers could read
differently, and sends errors in the API's format.

An error is OpenAI's object; on `/v1/messages` and below it is Anthropic's (https://docs.anthropic.com/en/api/errors),
with 529 `overloaded_error` for 503. In a stream it is `data: {"error": …}` for chat and completions, Anthropic's event
`error` for messages, and for /v1/responses the event `error`, which also contains OpenAI's object for OpenAI's SDK
(https://platform.openai.com/docs/api-reference/responses-streaming/error)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httptools
import orjson
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.router import Choice, Ticket
from appliance.gateway.core.routes import RESPONSES, UNKNOWN, Route, is_anthropic, plain_target
from appliance.gateway.core.spending import KeyUse, OwnerUse
from appliance.gateway.core.table import NOBODY, Caller
from appliance.gateway.requests.answers import Tokens
from appliance.gateway.requests.request_check import Checked

Headers = Mapping[bytes, bytes]
Pairs = Sequence[tuple[bytes, bytes]]

# The rest of a refused request's body is received and dropped for this long.
LINGER_S: Final = 2.0
# Engines send the same header (serve/vllm/answers.py).
VERSION: Final = b"x-appliance-model-version"
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Headers that must not repeat, because two parsers could choose different values.
_ONCE: Final = frozenset(b"host content-length transfer-encoding authorization content-type expect".split())
_NO_USE: Final = KeyUse(OwnerUse())


class Exchange:
    """One request and its answer. Times are of the monotonic clock. target: path and query. head_only: the answer has
    no body. session: id of the page's login, empty for a key. received_s: end of its head, for inference of its body.
    sent_s: when it was last sent to an engine. trace: W3C traceparent, if any. span: OpenTelemetry's, if exported.

    model: the requested name without version, once the model is known to exist. checked: the checked body, while the
    request counts as open. ticket: set while it waits for a replica. choice: its place on a replica. routed_model: the
    model or canary of this place. replica: the current or last replica. model_version: the version that the engine
    reported. extra: further headers of the answer. tokens: usage that the engine reported.

    head_sent: the answer's head was sent. sse: the answer is a stream of events, to which an error can be appended.
    stream_events: relayed events. body_complete: the request's body was read. ended: the error with which `end`
    cancelled it. broke_off: a server error occurred after the answer's head. The other fields are those of uvicorn's
    request cycle: body: received, unread bytes; more_body: the body is not complete; message_event: set when more
    arrives; keep_alive: the connection stays open; response_complete: the answer was sent."""

    route: Route = UNKNOWN
    caller: Caller = NOBODY
    use: KeyUse = _NO_USE
    request_id = trace = b""
    received_s = sent_s = first_byte_s = 0.0
    status = body_bytes = buffered_bytes = sent_bytes = stream_events = 0
    model = routed_model = model_version = replica = session = ""
    checked: Checked | None = None
    choice: Choice | None = None
    ticket: Ticket | None = None
    extra: list[tuple[bytes, bytes]]
    span: Any = None
    head_only = head_sent = sse = broke_off = response_complete = False
    more_body = True
    ended: HttpError | None = None
    task: asyncio.Task[None]
    _chunked = False

    def __init__(
        self, connection: Connection, method: bytes, target: bytes, headers: Headers, keep_alive: bool
    ) -> None:
        self.connection, self.method, self.headers, self.keep_alive = connection, method, headers, keep_alive
        self.target = plain_target(target)
        self.path = self.target.partition(b"?")[0]
        length = headers.get(b"content-length")
        self.content_length = None if length is None else int(length)
        self.chunked = b"transfer-encoding" in headers
        self.body_complete = not (self.chunked or self.content_length)
        self.body, self.message_event, self.tokens = bytearray(), asyncio.Event(), Tokens()
        self.extra = []
        self._expects = headers.get(b"expect", b"").lower() == b"100-continue" and not self.body_complete

    @property
    def ids(self) -> dict[str, str]:
        """Fields for the request's log lines (runtime.logs)."""
        return {
            "request_id": self.request_id.decode(),
            "key_id": self.caller.id,
            "model": self.model,
            "version": self.model_version,
            "replica": self.replica,
            "trace_id": self.trace[3:35].decode(),
        }

    def end(self, error: HttpError) -> None:
        """Cancel the request's coroutine, which then sends this error in whatever form is still possible."""
        if self.ended is None:
            self.ended = error
            self.task.cancel()

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at its end. Raises HttpError 413 and 408."""
        if self.body_complete:
            return b""
        connection = self.connection
        if self._expects:
            self._expects = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.more_body and not self.body:  # a small body arrived with its head
            try:
                async with asyncio.timeout(connection.state.limits.body_grace_s):
                    while self.more_body and not self.body and connection.refusal is None:
                        self.message_event.clear()
                        connection.flow.resume_reading()  # uvicorn paused reading because much of the body was unread
                        await self.message_event.wait()
            except TimeoutError:
                text = "The request body came too slowly."
                raise HttpError(408, text, code="request_timeout", close=True) from None
        data, self.body, self.body_complete = bytes(self.body), bytearray(), not self.more_body
        if self.more_body and connection.refusal is not None:
            raise connection.refusal
        self.body_bytes += len(data)
        if self.body_bytes > (limit := getattr(connection.state.limits, self.route.body)):
            raise errors.body_too_large(limit)
        if self.body_complete and not connection.pipeline:
            connection.flow.resume_reading()  # a client's disconnect is only noticed while reading
        return data

    async def pieces(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    # -- the answer

    async def begin(self, status: int, headers: Pairs, data: bytes = b"") -> None:
        """Send the head with the first bytes of the body in one write, because each write is a packet."""
        fields = [*headers, (b"x-request-id", self.request_id), *self.extra]
        if self.route.kind == "inference":
            fields += self.use.headers()
        if is_anthropic(self.path):
            fields.append((b"request-id", self.request_id))
        self.keep_alive &= not self._expects  # after `Expect`, the client may or may not send its body now
        if not self.keep_alive:
            fields.append((b"connection", b"close"))
        self._chunked = all(name != b"content-length" for name, _ in headers) and status not in (204, 304)
        if self._chunked and not self.head_only:
            fields.append((b"transfer-encoding", b"chunked"))
        await self._send(_head(status, fields) + self._framed(data))
        self.head_sent, self.status = True, status

    async def events(self, data: bytes, version: bytes = b"") -> None:
        """Send events; the first call sends the head too. version: the model's version, once an engine has answered."""
        if self.head_sent:
            return await self.write(data)
        headers = [(VERSION, version)] if version else []
        headers += [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self.begin(200, [*headers, (b"x-accel-buffering", b"no")], data)
        self.sse = True

    async def write(self, data: bytes) -> None:
        if data:
            await self._send(self._framed(data))

    async def finish(self) -> None:
        """End the answer."""
        if self._chunked and not self.head_only:
            await self._send(b"0\r\n\r\n")
        self.response_complete = True
        if self.keep_alive:
            self.connection.on_response_complete()
        elif self.more_body:
            self.connection.linger()
        else:
            self.connection.close()

    async def whole(self, status: int, content_type: bytes, body: bytes, headers: Pairs = ()) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self.begin(status, [(b"content-type", content_type), *headers, length], body)
        await self._drained()  # a client that reads slowly gets its answer before the connection closes
        await self.finish()

    async def fail(self, error: HttpError) -> None:
        """Send an error: as the whole answer, as an event of a stream, or, within a plain body, by aborting the
        connection, because only that shows that the body is incomplete."""
        if self.response_complete:
            return
        self.broke_off = self.head_sent and error.status >= 500 and error.code != errors.GIVES_WAY
        if self.sse:
            self.keep_alive = False
            await self.write(error_event(error, self, self.stream_events))
            await self.finish()
        elif self.head_sent:
            self.connection.transport.abort()  # a clean end would make the answer look complete
        else:
            status, body = _shaped(error, self)
            self.keep_alive &= not error.close and not self.more_body
            await self.whole(status, b"application/json", body, _error_headers(error))

    def _framed(self, data: bytes) -> bytes:
        if self.head_only or not data:
            return b""
        self.sent_bytes += len(data)
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    async def _send(self, data: bytes) -> None:
        await self._drained()
        self.connection.transport.write(data)

    async def _drained(self) -> None:
        """Wait for a client that reads slowly; after `write_stall_s` abort its connection, which cancels this."""
        if not self.connection.flow.write_paused:
            return
        loop, stall_s = self.connection.loop, self.connection.state.limits.write_stall_s
        stalled = loop.call_later(stall_s, self.connection.transport.abort)
        try:
            await self.connection.flow.drain()
        finally:
            stalled.cancel()


def _head(status: int, headers: Pairs) -> bytes:
    return b"".join((STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in headers], b"\r\n"))


class Connection(HttpToolsProtocol):
    """One client's connection. running: the current or last answered exchange; `cycle`, uvicorn's name, is the last
    parsed exchange. refusal: the error after which no more bytes are read. private: it uses the private socket. state:
    the process's `State`, untyped because its module imports this one."""

    def __init__(self, config: Config, server_state: ServerState, state: Any, *, private: bool = False) -> None:
        super().__init__(config, server_state, {})
        self.state, self.private = state, private
        self.running: Exchange | None = None
        self.refusal: HttpError | None = None
        self._awaits_since_s: float | None = time.monotonic()  # since when the connection waits for a head
        self._unparsed_bytes = 0
        self._in_head, self._offers_upgrade = True, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.state.limits.max_connections:
            self._refuse(errors.unavailable("Too many open connections.", "too_many_connections", 2))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pipeline.clear()
        if self.running is not None:
            self.running.task.cancel()
            self.running = self.cycle = None  # type: ignore[assignment]  # no cycle of references is left

    def eof_received(self) -> None:
        """Treat a client that closes its half as gone, so that no engine computes an answer that is not read."""
        self.close()

    def close(self) -> None:
        """Close the connection once the client has read its answer, at the latest after `write_stall_s`."""
        self.transport.close()
        self.timeout_keep_alive_task = self.loop.call_later(self.state.limits.write_stall_s, self.transport.abort)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        cycle.task = self.loop.create_task(app(cycle))

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._awaits_since_s = time.monotonic()
        if not self.pipeline:  # resume reading only once no pipelined request waits
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        if self._in_head and not self._unparsed_bytes and self._awaits_since_s is not None:
            self._awaits_since_s = time.monotonic()
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
        if self.parser is not None and self._unparsed_bytes > self.state.limits.head_bytes:
            # Bounds endless header names, trailers and chunk extensions, which the parser would buffer.
            status = 431 if self._in_head else 400
            self._refuse(errors.protocol_error("The request has too many bytes outside its body.", status))

    def _without_offer(self, rest: bytes) -> bytes:
        """Return the head without its Upgrade header, plus the bytes after it, for a new parser. A server may ignore an
        Upgrade (RFC 9110, 7.8), but httptools reads no body after one; Java's client and `curl --http2` send it with
        every request."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._offers_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((line, *lines, b"", rest))

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        if self.state.stopping:
            raise errors.unavailable("The server is shutting down.", "shutting_down", 2)
        self.url, self.headers, self._in_head = b"", [], True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a header after the body, a trailer, is dropped
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed_bytes, self._awaits_since_s = False, 0, None
        version, method, headers = self.parser.get_http_version(), self.parser.get_method(), dict[bytes, bytes]()
        head_bytes = len(self.url)
        for name, value in self.headers:
            head_bytes += len(name) + len(value) + 4
            if name in headers and name in _ONCE:
                raise errors.protocol_error("A header that must occur once was sent twice.")
            headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
        coding = headers.get(b"transfer-encoding")
        if head_bytes > self.state.limits.head_bytes:
            raise errors.protocol_error("The head of the request is too long.", 431)
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
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self.cycle = exchange = Exchange(self, method, self.url, headers, keep_alive)  # type: ignore[assignment]
        if self.running is None or self.running.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if not self._offers_upgrade:
            self._in_head = True
            super().on_message_complete()

    def _refuse(self, error: HttpError) -> None:
        """Send an error for bytes that are not a valid request, and close. If the bytes belong to the body of the
        current request, that request fails with the error."""
        self.parser, self.refusal, error.close = None, error, True  # type: ignore[assignment]
        self._awaits_since_s = None
        if self.running is not None and not self.running.response_complete:
            self.running.keep_alive = False
            self.cycle.message_event.set()
            return
        self.state.metrics.requests("unknown", error.status).inc()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self.state.new_request_id())]
        body = error.body()
        headers += [*_error_headers(error), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        self.transport.write(_head(error.status, headers) + body)
        self.linger()

    def linger(self) -> None:
        """Close the connection after the client had time to read its answer. Closing with unread bytes resets the
        connection, which can destroy the answer on its way."""
        self.parser = None  # type: ignore[assignment]
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.close)

    def end_if_late(self, now_s: float) -> None:
        """Close a connection that idles too long, or sends its head too slowly. now_s: monotonic time."""
        limits, begun = self.state.limits, self._unparsed_bytes or self.running is None
        longest_s = limits.head_timeout_s if begun else limits.keepalive_s
        if self._awaits_since_s is None or now_s - self._awaits_since_s < longest_s:
            return
        self._awaits_since_s = None
        if not self._unparsed_bytes:
            self.close()  # idle: no byte of a head arrived
        else:
            self._refuse(HttpError(408, "The request head came too slowly.", code="request_timeout", close=True))


def _error_headers(error: HttpError) -> list[tuple[bytes, bytes]]:
    # The `openai` client retries 409 by default, but a conflict does not resolve by itself.
    should_retry = False if error.should_retry is None and error.status == 409 else error.should_retry
    fields = {
        b"retry-after": error.retry_after_s,
        b"x-should-retry": None if should_retry is None else str(should_retry).lower(),
        b"www-authenticate": "Bearer" if error.status == 401 else None,
        b"allow": error.allow,
    }
    return [(name, str(value).encode()) for name, value in fields.items() if value is not None]


def _shaped(error: HttpError, exchange: Exchange) -> tuple[int, bytes]:
    """Return the status and body of an error in the API's format."""
    if not is_anthropic(exchange.path):
        return error.status, error.body()
    status = 529 if error.status == 503 else error.status
    kind = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return status, orjson.dumps({**body, "request_id": exchange.request_id.decode()})


def error_event(error: HttpError, exchange: Exchange, events_sent: int) -> bytes:
    """Format an error as the next event of a stream."""
    _, body = _shaped(error, exchange)
    if exchange.route.name == RESPONSES:
        inner = orjson.loads(body)["error"]
        fields = {"code": inner["code"] or inner["type"], "message": inner["message"], "param": inner["param"]}
        body = orjson.dumps({"type": "error", "sequence_number": events_sent, **fields, "error": inner})
    elif not is_anthropic(exchange.path):
        return b"data: %b\n\n" % body
    return b"event: error\ndata: %b\n\n" % body
