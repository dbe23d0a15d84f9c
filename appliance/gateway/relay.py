"""One control request: streamed to the controller and back with backpressure in both directions.

Uploads of any size pass through; only error answers are gathered, to be put into OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from . import errors, wire
from .errors import ApiError
from .upstream import UpstreamConnection, lose_interest
from .wire import Request

if TYPE_CHECKING:
    from .gateway import Gateway
    from .server import ClientConnection

ERROR_BODY_BYTES = 64 * 1024


class Relay:
    """See the module's docstring. `client` is None once the client is gone or the response is finished."""

    __slots__ = (
        "gateway",
        "client",
        "request",
        "_conn",
        "_connecting",
        "_pending",
        "_head_sent",
        "_chunked",
        "_kept",
        "_kept_bytes",
        "_progress_s",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        self.gateway = gateway
        self.client: ClientConnection | None = client
        self.request = request
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pending: list[bytes] = []
        self._head_sent = False
        self._chunked = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._progress_s = 0.0

    # -- Handler

    def start(self) -> None:
        pool, path = self.gateway.pool, self.gateway.config.controller_socket
        self._progress_s = time.monotonic()
        # Only a request that may safely arrive twice rides on a connection that may just be closing.
        conn = pool.acquire(path) if self.request.method == b"GET" else None
        if conn is not None:
            self._send(conn)
            return
        assert self.client is not None
        self.client.pause_reading()
        self._connecting = pool.connect(path, self._connected, wait_s=self.gateway.limits.controller_wait_s)

    def body(self, data: bytes) -> None:
        framed = wire.chunk(data) if self.request.chunked else data
        if self._conn is not None:
            self._progress_s = time.monotonic()
            self._conn.write(framed)
        else:
            self._pending.append(framed)

    def body_end(self) -> None:
        if self.request.chunked:
            if self._conn is not None:
                self._conn.write(wire.LAST_CHUNK)
            else:
                self._pending.append(wire.LAST_CHUNK)

    def client_lost(self) -> None:
        self.client = None
        self._drop()

    def client_paused(self, paused: bool) -> None:
        if self._conn is not None:
            if paused:
                self._conn.pause_reading()
            else:
                self._progress_s = time.monotonic()
                self._conn.resume_reading()

    def cancel(self, error: ApiError) -> None:
        self._drop()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        client = self.client
        if client is None or client.write_paused or not self.request.complete:
            return
        if now_s - self._progress_s > self.gateway.limits.upstream_silence_s:
            self._drop()
            self._fail(ApiError(504, "The controller did not answer in time.", kind="server_error", code="timeout"))

    # -- towards the controller

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        client = self.client
        if client is None:
            if isinstance(result, UpstreamConnection):
                result.abort()
            return
        if isinstance(result, OSError):
            self.gateway.metrics.events["controller_away"] += 1
            self._fail(
                errors.unavailable("The controller of this box is restarting. Please retry.", "controller_away", 2)
            )
            return
        self._send(result)
        client.resume_reading()

    def _send(self, conn: UpstreamConnection) -> None:
        self._conn = conn
        self._progress_s = time.monotonic()
        conn.start(self, wire.controller_head(self.request) + b"".join(self._pending))
        self._pending = []

    def upstream_paused(self, paused: bool) -> None:
        if self.client is not None:
            if paused:
                self.client.pause_reading()
            else:
                self.client.resume_reading()

    # -- the controller's answer

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        if done:
            self._conn = None
            if not self.request.complete:
                # Answered early: the rest of the body must not become the next request on that connection.
                conn.abort()
        client = self.client
        if client is None:
            return
        self._progress_s = time.monotonic()
        status = conn.status
        if self._head_sent:
            self._write(body, done)
        elif status >= 400:
            self._kept.append(body)
            self._kept_bytes += len(body)
            if self._kept_bytes > ERROR_BODY_BYTES:
                self._drop()
                self._fail(errors.from_upstream(status, b""))
            elif done:
                error = errors.from_upstream(status, b"".join(self._kept))
                retry_after_s = wire.retry_after_s(conn.headers)
                if retry_after_s is not None:
                    error.retry_after_s = min(max(retry_after_s, 1), errors.MAX_RETRY_AFTER_S)
                self._fail(error)
        elif body or done:
            self._send_head(conn)
            self._write(body, done)

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        if self.client is None:
            return
        if not self._head_sent and conn.reused and not conn.answered and self.request.method == b"GET":
            self.start()
            return
        self._fail(
            ApiError(
                502,
                "The controller of this box stopped while it answered. Please retry.",
                kind="server_error",
                code="controller_away",
                retry_after_s=2,
            )
        )

    # -- towards the client

    def _send_head(self, conn: UpstreamConnection) -> None:
        client = self.client
        assert client is not None
        self._head_sent = True
        request = self.request
        request.status = conn.status
        request.first_byte_s = time.monotonic()
        length = conn.headers.get(b"content-length")
        bodyless = conn.status in (204, 304)
        self._chunked = length is None and not bodyless and request.version == "1.1"
        extra = wire.controller_response_headers(conn.headers)
        extra.append((b"x-content-type-options", b"nosniff"))
        client.write(
            wire.response_head(
                conn.status,
                request.request_id,
                length=None if bodyless or length is None else int(length),
                chunked=self._chunked,
                close=not client.will_keep_alive or (length is None and not self._chunked and not bodyless),
                processing_s=request.first_byte_s - request.received_s,
                extra=extra,
            )
        )

    def _write(self, body: bytes, done: bool) -> None:
        client = self.client
        assert client is not None
        self.request.sent_bytes += len(body)
        if self._chunked:
            data = (wire.chunk(body) if body else b"") + (wire.LAST_CHUNK if done else b"")
        else:
            data = body
        if data:
            client.write(data)
        if done:
            self.client = None
            client.finished(keep_alive=self._chunked or self.request.version == "1.1")

    def _fail(self, error: ApiError) -> None:
        client, self.client = self.client, None
        if client is None:
            return
        if self._head_sent:
            client.abort_response()
        else:
            client.answer_error(error)

    def _drop(self) -> None:
        lose_interest(self._connecting, self._conn)
        self._connecting = self._conn = None


class WholeRelay(Relay):
    """Of a request whose body is here already: it was gathered to be checked."""

    __slots__ = ()

    def start(self) -> None:
        super().start()
        for data in self.request.chunks:
            self.body(data)
        self.body_end()
