"""One inference request: place it, hold it, send it, retry it, relay its answer.

Rules, in the order in which they bind:
- Until a byte of the engine's answer has gone to the client, a failure of the engine is nobody's business: the
  request is placed again (another replica, or held until one opens), at most MAX_ATTEMPTS times, so that a
  request that kills engines cannot kill them all.
- After that, a stream ends with an SSE error event; nothing is ever cut short silently.
- Bytes of a good answer are relayed as they are; errors are always rewritten into OpenAI's object.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import orjson

from serve.holds import Refusal, Ticket
from serve.router import Choice

from . import errors, wire
from .errors import ApiError
from .request_check import Checked
from .upstream import UpstreamConnection
from .wire import Request

if TYPE_CHECKING:
    from .gateway import Gateway
    from .server import ClientConnection

MAX_ATTEMPTS = 3
ERROR_BODY_BYTES = 64 * 1024
SSE = b"text/event-stream; charset=utf-8"
_SSE_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_ERROR_EVENT = b'data: {"error"'
_HELD_COMMENT = b": held\n\n"


class Exchange:
    """See the module's docstring. `client` is None once the client is gone or the response is finished."""

    __slots__ = (
        "gateway",
        "client",
        "request",
        "checked",
        "_body",
        "_choice",
        "_conn",
        "_connecting",
        "_ticket",
        "_held_since_s",
        "_hold_deadline_s",
        "_attempts",
        "_head_sent",
        "_chunked",
        "_relayed",
        "_sse",
        "_kept",
        "_kept_bytes",
        "_tail",
        "_error_seen",
        "_progress_s",
        "_comment_s",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request, checked: Checked) -> None:
        self.gateway = gateway
        self.client: ClientConnection | None = client
        self.request = request
        self.checked = checked
        chunks = request.chunks
        self._body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        request.chunks = []
        self._choice: Choice | None = None
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._ticket: Ticket[Exchange] | None = None
        self._held_since_s = 0.0
        self._hold_deadline_s = 0.0
        self._attempts = 0
        self._head_sent = False
        self._chunked = False
        self._relayed = False
        self._sse = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._tail = b""
        self._error_seen = False
        self._progress_s = 0.0
        self._comment_s = 0.0

    # -- Handler

    def start(self) -> None:
        self.place()

    def body(self, data: bytes) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def body_end(self) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def client_lost(self) -> None:
        self.client = None
        self._leave_queue()
        self._drop_upstream()

    def client_paused(self, paused: bool) -> None:
        conn = self._conn
        if conn is not None:
            if paused:
                conn.pause_reading()
            else:
                self._progress_s = time.monotonic()
                conn.resume_reading()

    def cancel(self, error: ApiError) -> None:
        """End the request from outside (revoked key, shutdown)."""
        self._leave_queue()
        self._drop_upstream()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        if self._ticket is not None:
            if self.checked.stream and now_s >= self._comment_s:
                self._comment(now_s)
        elif self._conn is not None and self.client is not None and not self.client.write_paused:
            if now_s - self._progress_s > self.gateway.limits.upstream_silence_s:
                self.gateway.metrics.events["upstream_silent"] += 1
                self._drop_upstream(failed=True)
                self._fail(errors.engine_failed(504))

    # -- placing

    def place(self) -> None:
        """Send the request to a replica that can take it, or hold it."""
        gateway, checked = self.gateway, self.checked
        if checked.model not in gateway.router.models:
            # It was there when the request came: the model was deleted while it waited.
            self._leave_queue()
            self._fail(errors.model_not_found(checked.model))
            return
        now = time.monotonic()
        # Whoever waits goes first, or a stream of new requests could starve them.
        if self._ticket is None and gateway.holds.held(checked.model):
            self._hold(now)
            return
        choice = gateway.router.choose(checked.model, checked.tokens, checked.stream, checked.prefix, now)
        if choice is None:
            if self._ticket is None:
                self._hold(now)
            return
        self._leave_queue()
        self._choice = choice
        gateway.changed()
        conn = gateway.pool.acquire(choice.replica.socket)
        if conn is not None:
            self._send(conn)
        else:
            self._connecting = gateway.pool.connect(choice.replica.socket, self._connected)

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if self.client is None or self._choice is None:
            if isinstance(result, UpstreamConnection):
                self.gateway.pool.put(result)
        elif isinstance(result, OSError):
            # Nothing was sent: this costs the request no attempt, only the replica its good name.
            self.gateway.metrics.events["connect_failed"] += 1
            self._undispatch(failed=True)
            self.place()
        else:
            self._send(result)

    def _send(self, conn: UpstreamConnection) -> None:
        request = self.request
        now = time.monotonic()
        if not self._attempts and not self._held_since_s:
            self.gateway.metrics.added.observe(now - request.received_s)
        self._conn = conn
        self._progress_s = now
        self._kept, self._kept_bytes = [], 0
        # Not the client's id, and a new one for each attempt: an engine must never see one twice.
        engine_id = self.gateway.new_request_id()
        assert request.route is not None
        conn.start(self, wire.engine_head(request.route.path, engine_id, len(self._body)) + self._body)
        if self.client is not None and self.client.write_paused:
            conn.pause_reading()

    def _hold(self, now: float) -> None:
        gateway = self.gateway
        if not self._held_since_s:
            self._held_since_s = now
            hold_s = min(gateway.router.models[self.checked.model].hold_s, gateway.config.holds.hold_s)
            self._hold_deadline_s = now + hold_s
            self._comment_s = now + gateway.config.holds.sse_grace_s
        result = gateway.holds.add(self.checked.model, self, len(self._body), self._hold_deadline_s, now)
        if isinstance(result, Refusal):
            self.hold_refused(result)
            return
        self._ticket = result
        gateway.metrics.events["held"] += 1
        gateway.held(self.checked.model)

    def hold_refused(self, refusal: Refusal) -> None:
        """It may not wait (any longer). Its ticket is already out of the queue."""
        self._ticket = None
        self.gateway.metrics.events["hold_refused"] += 1
        self._fail(
            errors.unavailable(
                f"The model `{self.checked.model}` is not ready: {refusal.value}. Please retry.",
                "model_not_ready",
                self.gateway.config.holds.retry_after_s,
            )
        )

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            if self.gateway.holds.remove(ticket):
                self.gateway.metrics.held_for.observe(time.monotonic() - self._held_since_s)
                self.gateway.changed()

    def _comment(self, now_s: float) -> None:
        assert self.client is not None
        self._comment_s = now_s + self.gateway.config.holds.sse_interval_s
        if not self._head_sent:
            self._sse = True
            self._send_head(SSE, None, _SSE_HEADERS)
        self._write(_HELD_COMMENT)

    # -- the engine's answer

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        if done:
            self._conn = None
        if self.client is None:
            return
        now = time.monotonic()
        self._progress_s = now
        if self._relayed:
            self._relay(body, done)
            return
        status = conn.status
        if status == 200 and conn.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            if body.startswith(_ERROR_EVENT) and self._first_event_fails(body, done):
                return
            if body:
                self._first_bytes(now)
                self._sse = True
                if not self._head_sent:
                    self._send_head(SSE, None, _SSE_HEADERS)
                else:
                    self._write(b": version %b\n\n" % (self._version() or b""))
                self._relay(body, done)
            elif done:
                self._retry(errors.engine_failed())
            return
        if body:
            self._kept.append(body)
            self._kept_bytes += len(body)
        if status >= 400:
            if self._kept_bytes > ERROR_BODY_BYTES:
                self._drop_upstream()
                self._refused(status, b"")
            elif done:
                self._refused(status, b"".join(self._kept), conn)
        elif done:
            self._answer_whole(conn, now)
        elif self._kept_bytes > self.gateway.limits.buffered_response_bytes:
            self._first_bytes(now)
            self._send_kept(conn)

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        if self.client is None:
            return
        stale = conn.reused and not conn.answered
        if not stale:
            self.gateway.metrics.events["upstream_died"] += 1
        if self._relayed:
            self._undispatch(failed=True)
            self._fail(errors.engine_failed())
        elif stale:
            # The engine had closed an idle connection just as we used it: no failure, a fresh one will do.
            self._undispatch(failed=False)
            self.place()
        else:
            self._retry(errors.engine_failed())

    def upstream_paused(self, paused: bool) -> None:
        return  # the request was written whole; nothing of it can be paused

    def _retry(self, otherwise: ApiError) -> None:
        self._attempts += 1
        self._undispatch(failed=True)
        if self._attempts >= MAX_ATTEMPTS:
            self._fail(otherwise)
            return
        self.gateway.metrics.events["retried"] += 1
        self.place()

    def _refused(self, status: int, body: bytes, conn: UpstreamConnection | None = None) -> None:
        """A complete error answer of the engine, nothing relayed yet."""
        error = errors.from_upstream(status, body)
        if conn is not None:
            error.retry_after_s = wire.retry_after_s(conn.headers)
            if error.retry_after_s is not None:
                error.retry_after_s = min(error.retry_after_s, errors.MAX_RETRY_AFTER_S)
        moved = status == 404 and error.message.startswith("The model ")
        if moved or _engine_dead(error):
            # A dying engine answers 500 before it vanishes; a 404 for a model of our table means that the engine
            # was given another one a moment ago. Both pass with the next table. Any other 500 is the request's
            # own: retrying it, or avoiding the replica for it, would let one client starve the others.
            if moved:
                error = errors.unavailable(error.message, "model_not_ready", self.gateway.config.holds.retry_after_s)
            self._retry(error)
            return
        if status in (401, 403):
            error = errors.engine_failed()
        elif status == 404 and error.message == "Not Found":
            error = errors.wrong_task(self.checked.model, self.request.route_name)
        self._end_dispatch()
        self._fail(error)

    def _first_event_fails(self, body: bytes, done: bool) -> bool:
        """True if a stream that begins with a server error could be handled without telling the client."""
        if _error_event_code(body) is None:
            return False
        error = _event_error(body)
        if not _engine_dead(error):
            return False
        if not done:
            self._drop_upstream(failed=True)
        self._retry(error)
        return True

    def _first_bytes(self, now: float) -> None:
        request, choice = self.request, self._choice
        assert choice is not None
        self._relayed = True
        request.first_byte_s = now
        self.gateway.router.succeed(choice)
        self.gateway.metrics.observe_ttft(choice.model, choice.replica.version, now - request.received_s, now)

    def _answer_whole(self, conn: UpstreamConnection, now: float) -> None:
        self._first_bytes(now)
        body = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        client = self.client
        assert client is not None
        if self._head_sent:
            # Comments opened a stream, yet the engine answered whole: relay it as what it is inside the stream.
            self._write(b"data: %b\n\n" % body)
            self._finish()
            return
        self.request.status = conn.status
        self.request.sent_bytes = len(body)
        head = wire.response_head(
            conn.status,
            self.request.request_id,
            content_type=conn.headers.get(b"content-type", b"application/json"),
            length=len(body),
            close=not client.will_keep_alive,
            version=self._version(),
            processing_s=now - self.request.received_s,
        )
        client.write(head + body)
        self._end_dispatch()
        self.client = None
        client.finished(keep_alive=True)

    def _send_kept(self, conn: UpstreamConnection) -> None:
        length = conn.headers.get(b"content-length")
        self._send_head(
            conn.headers.get(b"content-type", b"application/json"), int(length) if length is not None else None, ()
        )
        kept, self._kept = self._kept, []
        self._write(b"".join(kept))

    # -- towards the client

    def _version(self) -> bytes | None:
        return self._choice.replica.version.encode() if self._choice is not None else None

    def _send_head(self, content_type: bytes, length: int | None, extra: tuple[tuple[bytes, bytes], ...]) -> None:
        client = self.client
        assert client is not None
        self._head_sent = True
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
                version=self._version(),
                processing_s=time.monotonic() - self.request.received_s,
                extra=extra,
            )
        )

    def _write(self, data: bytes) -> None:
        if data and self.client is not None:
            self.request.sent_bytes += len(data)
            self.client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _relay(self, body: bytes, done: bool) -> None:
        if body:
            if self._sse:
                if _ERROR_EVENT in body:
                    body = _rewritten_events(body)
                    self._error_seen = True
                end = self.request.route.stream_end  # type: ignore[union-attr]
                if end is not None:
                    self._tail = body[-len(end) :] if len(body) >= len(end) else (self._tail + body)[-len(end) :]
            if not done:
                self._write(body)
                return
        if done:
            end = self.request.route.stream_end  # type: ignore[union-attr]
            if self._sse and end is not None and self._tail != end and not self._error_seen:
                # A clean end of HTTP without the protocol's own ending is a truncation that no client would notice.
                self._write(body)
                self.gateway.metrics.events["stream_unfinished"] += 1
                self._end_dispatch()
                self._fail(errors.engine_failed())
                return
            self._finish(body)

    def _finish(self, body: bytes = b"") -> None:
        client = self.client
        assert client is not None
        if self._chunked:
            self.request.sent_bytes += len(body)
            client.write((wire.chunk(body) if body else b"") + wire.LAST_CHUNK)
        else:
            self._write(body)
        self._end_dispatch()
        self.client = None
        client.finished(keep_alive=self._chunked or not self._sse)

    def _fail(self, error: ApiError) -> None:
        """Tell the client, in whatever form is still possible, and finish."""
        client, self.client = self.client, None
        if client is None:
            return
        if not self._head_sent:
            client.answer_error(error)
        elif self._sse:
            event = wire.sse_error(error)
            if self._tail and not self._tail.endswith(b"\n\n"):
                event = b"\n\n" + event
            self.gateway.metrics.events["stream_error"] += 1
            client.write(wire.chunk(event) + wire.LAST_CHUNK if self._chunked else event)
            client.finished(keep_alive=False)
        else:
            # Part of a plain body is out: a broken transfer is the only error left that every client notices.
            client.abort_response()

    # -- bookkeeping

    def _drop_upstream(self, *, failed: bool = False) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._conn is not None:
            conn, self._conn = self._conn, None
            conn.abort()
        self._undispatch(failed=failed)

    def _undispatch(self, *, failed: bool) -> None:
        if self._choice is not None and failed:
            self.gateway.router.fail(self._choice, time.monotonic())
        self._end_dispatch()

    def _end_dispatch(self) -> None:
        if self._choice is not None:
            choice, self._choice = self._choice, None
            self.gateway.ended(choice)


def _engine_dead(error: ApiError) -> bool:
    # vLLM's EngineDeadError, as its HTTP handlers and its stream generators spell it.
    return error.status >= 500 and "EngineCore" in error.message


def _error_event_code(body: bytes) -> int | None:
    line = body[6:].split(b"\n", 1)[0]
    try:
        return errors.event_code(orjson.loads(line))
    except orjson.JSONDecodeError:
        return None


def _event_error(body: bytes) -> ApiError:
    line = body[6:].split(b"\n", 1)[0]
    return errors.from_upstream(_error_event_code(body) or 500, line)


def _rewritten_events(body: bytes) -> bytes:
    """The same events with vLLM's error objects turned into OpenAI's."""
    lines = body.split(b"\n")
    for i, line in enumerate(lines):
        if line.startswith(_ERROR_EVENT) and _error_event_code(line) is not None:
            lines[i] = b"data: " + _event_error(line).body()
    return b"\n".join(lines)
