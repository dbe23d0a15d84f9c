"""One client's connection, and one request on it with its answer: the body as it comes, the answer as it goes.

The connection is uvicorn's, and what that leaves open: the size and the time of a head, headers that two parsers could
read differently, and refusals in the API's own shape.

An error is OpenAI's object on every route except Anthropic's, `/v1/messages` and below, whose shape and types are after
https://docs.anthropic.com/en/api/errors; what is 503 elsewhere is 529 `overloaded_error` there. In a stream: `data:
{"error": …}` for chat and completions, as vLLM and OpenAI's older routes do; for /v1/responses OpenAI's event `error`
(https://platform.openai.com/docs/api-reference/responses-streaming/error) with the object inside it as well, by which
its SDK raises; Anthropic's event `error`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httptools
import orjson
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.router import Choice, Ticket
from appliance.gateway.core.routes import RESPONSES, UNKNOWN, Kind, Route, is_anthropic, plain_target
from appliance.gateway.core.spending import KeyUse, OwnerUse
from appliance.gateway.core.table import NOBODY, Caller
from appliance.gateway.requests.request_check import Checked

Headers = Mapping[bytes, bytes]
Pairs = Sequence[tuple[bytes, bytes]]

# The rest of a refused request's body is read for this long, and so much of it: closing with unread bytes resets the
# connection, which can destroy the answer on its way.
LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 4 * 1024 * 1024
# A refused request with a larger body than this ends its connection.
_DISCARD_BYTES: Final = 256 * 1024
# An engine's answer says so too (serve/vllm/answers.py).
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
# Inside a JSON string a quote is always escaped, so these match the engine's own fields and never a client's text.
# Answers of /v1/responses have more of the request than its texts (the schemas of its tools): requests/transcript.py.
USAGE: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage": ?\{')
# All counts in one pass: four searches took 1.8 times as long.
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}
# With two of them two parsers could disagree.
_ONCE: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"}
)
_NO_USE: Final = KeyUse(OwnerUse())


class ClientGone(Exception):
    """The client left, or took nothing for too long; there is nobody to answer."""


class Tokens:
    """Usage of one request. The newest number counts: Anthropic's streams report the prompt first and the completion
    last. cached: tokens of the prompt that a cache of prefixes had."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def read(self, body: bytes) -> None:
        """Take the usage from a piece of an answer, if it holds one."""
        starts = list(_USAGE.finditer(body))
        if not starts:
            return
        counts: dict[bytes, int] = {}
        for name, digits in _COUNTS.findall(body, starts[-1].end()):
            counts.setdefault(_NAMES.get(name, name), int(digits))  # the first of each is the engine's own
        self.cached = counts.get(b"cached", self.cached)
        if b"prompt" in counts:
            # Anthropic's `input_tokens` are those that no cache had.
            self.prompt = sum(counts.get(name, 0) for name in (b"prompt", b"cache_read_input", b"cache_creation_input"))
        self.completion = counts.get(b"completion", self.completion)


class Exchange:
    """Times by the monotonic clock. target: path and query. head_only: its answer has no body. session: the login of
    the page that it came by, empty for a key. received_s: when its head came, of inference its body; sent_s: when an
    engine got it last. trace: its W3C traceparent, empty without one; span: OpenTelemetry's, if traces are exported.

    model: the one it names, once known to exist, without a version. checked: once it counts as open. infers: it is for
    an engine. choice: the replica that has it; ticket: its place in the queue while it is held. routed_model: name in
    the table by which it was placed, the model's or its canary's. replica, model_version: where it is or was last; the
    version as the engine names it, once it answers. ignored: headers that name the parts of it that no engine gets.
    tokens: its cost as the engine reported it.

    head_sent: the status is out. sse: as a stream of events, which an error can join; stream_events: events relayed.
    body_complete: all of the request's body was read. ended: why it was ended from outside. broke_off: an error
    followed its answer's head."""

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
    ignored: Pairs = ()
    span: Any = None
    infers = head_only = head_sent = sse = finished = broke_off = False
    ended: HttpError | None = None

    def __init__(self, limits: Limits, scope: Any, receive: Any, send: Any) -> None:
        self.connection: Connection = scope["connection"]
        self.method, self.headers = scope["method"].encode(), scope["fields"]
        self.target = plain_target(scope["target"])
        self.path = self.target.partition(b"?")[0]
        length = self.headers.get(b"content-length")
        self.content_length = None if length is None else int(length)
        self.chunked = b"transfer-encoding" in self.headers
        self.body_complete = not (self.chunked or self.content_length)
        self.tokens = Tokens()
        self._limits, self._receive, self._send = limits, receive, send
        self.task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]

    @property
    def ids(self) -> dict[str, str]:
        """Fields for its log lines (runtime.logs)."""
        return {
            "request_id": self.request_id.decode(),
            "key_id": self.caller.id,
            "model": self.model,
            "version": self.model_version,
            "replica": self.replica,
            "trace_id": self.trace[3:35].decode(),
        }

    def end(self, error: HttpError) -> None:
        """Cancel its coroutine and answer this error, in the form that is still possible: the key was revoked, or the
        box stops."""
        if self.ended is None:
            self.ended = error
            self.task.cancel()

    # -- the body

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """The body. Raises HttpError 413 and 408, ClientGone."""
        limits, connection, waited_s = self._limits, self.connection, 0.0
        while not self.body_complete:
            if connection.running.message_event.is_set():  # a small body has come with its head
                message = await self._receive()
            else:
                began_s, left_s = time.monotonic(), limits.body_grace_s + self.body_bytes / limits.body_bytes_per_s
                try:
                    async with asyncio.timeout(left_s - waited_s):
                        message = await self._receive()
                except TimeoutError:
                    text = "The request body came too slowly."
                    raise HttpError(408, text, code="request_timeout", close=True) from None
                waited_s += time.monotonic() - began_s
            if message["type"] == "http.disconnect":
                raise ClientGone
            if message["more_body"] and connection.refusal is not None:
                raise connection.refusal
            data, self.body_complete = message["body"], not message["more_body"]
            self.body_bytes += len(data)
            if self.body_bytes > limit:
                raise errors.body_too_large(limit)
            if self.body_complete and not connection.pipeline:
                connection.flow.resume_reading()  # uvicorn has paused after much of it, and a leaver is not seen
            if data:
                yield data

    # -- the answer

    def _headers(self, headers: Pairs) -> list[tuple[bytes, bytes]]:
        """These, and those that all answers have."""
        every = [*headers, (b"x-request-id", self.request_id), *self.ignored]
        if self.route.kind is Kind.INFERENCE:
            every += self.use.headers()
        if is_anthropic(self.path):
            every.append((b"request-id", self.request_id))
        if not self.connection.running.keep_alive:
            every.append((b"connection", b"close"))
        return every

    async def begin(self, status: int, headers: Pairs) -> None:
        await self._out({"type": "http.response.start", "status": status, "headers": self._headers(headers)})
        self.head_sent, self.status = True, status

    async def begin_stream(self, version: bytes | None) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        if version is not None:
            headers.append((VERSION, version))
        await self.begin(200, [*headers, (b"x-accel-buffering", b"no")])
        self.sse = True

    async def write(self, data: bytes) -> None:
        if data:
            await self._out({"type": "http.response.body", "body": data, "more_body": True})
            self.sent_bytes += len(data)

    async def finish(self, data: bytes = b"") -> None:
        await self._out({"type": "http.response.body", "body": data, "more_body": False})
        self.sent_bytes += len(data)
        self.finished = True

    async def whole(self, status: int, content_type: bytes, body: bytes, headers: Pairs = ()) -> None:
        await self.begin(status, [(b"content-type", content_type), *headers, (b"content-length", b"%d" % len(body))])
        await self.write(body)
        await self._drained()  # the end waits for a client that reads slowly
        if not self.body_complete:
            await self._linger()
        await self.finish()

    async def fail(self, error: HttpError) -> None:
        """Answer an error: as the whole answer, as an event of a stream, or, within a plain body, by ending the
        connection, since nothing else shows that the body is not whole."""
        if self.finished:
            return
        self.broke_off = self.head_sent and error.status >= 500 and error.code != errors.GIVES_WAY
        running = self.connection.running
        if self.sse:
            running.keep_alive = False
            await self.finish(error_event(error, self, self.stream_events))
        elif self.head_sent:
            self.connection.abort()
        else:
            status, body = _shaped(error, self)
            unread = not self.body_complete and (self.chunked or (self.content_length or 0) > _DISCARD_BYTES)
            running.keep_alive &= not (error.close or unread)
            await self.whole(status, b"application/json", body, _error_headers(error))

    async def _linger(self) -> None:
        """Read the rest of a body that is not wanted, briefly, unless its sender still waits for a 100 Continue; a
        connection with more of it ends."""
        read = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.body_complete and read < _LINGER_BYTES and b"expect" not in self.headers:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return
                    read, self.body_complete = read + len(message["body"]), not message["more_body"]
        self.connection.running.keep_alive &= self.body_complete

    async def _out(self, message: Any) -> None:
        await self._drained()
        await self._send(message)

    async def _drained(self) -> None:
        """Wait for a client that reads slowly. Raises ClientGone if it takes nothing for too long."""
        if self.connection.flow.write_paused:
            try:
                async with asyncio.timeout(self._limits.write_stall_s):
                    await self.connection.flow.drain()
            except TimeoutError:
                self.connection.abort()
                raise ClientGone from None


# -- the connection


class Connection(HttpToolsProtocol):
    """running: the cycle of the request being answered, or answered last; `cycle` is uvicorn's name for the last one
    parsed. refusal: why its bytes are not read any more. private: it came by the private socket.
    state: the process's `State`, whose module imports this one."""

    def __init__(self, config: Config, server_state: ServerState, state: Any, *, private: bool = False) -> None:
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

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed_bytes, self._head_since_s = False, 0, None
        version, method, headers = self.parser.get_http_version(), self.parser.get_method(), dict[bytes, bytes]()
        head_bytes = len(self.url)
        for name, value in self.headers:
            head_bytes += len(name) + len(value) + 4
            if name in headers and name in _ONCE:
                raise errors.protocol_error("A header was sent twice that a request has once.")
            headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value
        self.scope["method"], self.scope["http_version"] = method.decode(), version
        coding = headers.get(b"transfer-encoding")
        if head_bytes > self.state.limits.head_bytes:
            raise errors.protocol_error("The URL and the headers of the request are too long.", 431)
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
        self.scope |= {"connection": self, "target": self.url, "fields": headers}  # type: ignore[misc]
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
        self.state.metrics.counts["requests"]["unknown", error.status] += 1
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self.state.new_request_id())]
        body = error.body()
        headers += [*_error_headers(error), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
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


# -- errors


def _error_headers(error: HttpError) -> list[tuple[bytes, bytes]]:
    extra = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    # The `openai` client retries 409 unless told not to, but a conflict does not resolve by itself.
    should_retry = False if error.should_retry is None and error.status == 409 else error.should_retry
    if should_retry is not None:
        extra.append((b"x-should-retry", b"true" if should_retry else b"false"))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.allow is not None:
        extra.append((b"allow", error.allow.encode()))
    return extra


def _shaped(error: HttpError, exchange: Exchange) -> tuple[int, bytes]:
    """Status and body."""
    if not is_anthropic(exchange.path):
        return error.status, error.body()
    status = 529 if error.status == 503 else error.status
    kind = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return status, orjson.dumps({**body, "request_id": exchange.request_id.decode()})


def error_event(error: HttpError, exchange: Exchange, sent: int) -> bytes:
    """The error as an event of a stream that has had `sent` events."""
    _, body = _shaped(error, exchange)
    if exchange.route.name == RESPONSES:
        inner = orjson.loads(body)["error"]
        fields = {"code": inner["code"] or inner["type"], "message": inner["message"], "param": inner["param"]}
        body = orjson.dumps({"type": "error", "sequence_number": sent, **fields, "error": inner})
    elif not is_anthropic(exchange.path):
        return b"data: %b\n\n" % body
    return b"event: error\ndata: %b\n\n" % body
