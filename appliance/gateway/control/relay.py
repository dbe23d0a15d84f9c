"""Relays one control request: streams it to the controller and back with backpressure in both directions.

Uploads of any size pass through; it buffers only error answers, to convert them to OpenAI's format.
"""

from __future__ import annotations

import time

from appliance.gateway.access.page_login import cookies
from appliance.gateway.access.request import Request
from appliance.gateway.control.controller_call import ControllerCall
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.upstream import CHUNKED, UpstreamConnection
from appliance.gateway.state.state import State

ERROR_BODY_BYTES = 64 * 1024


class Relay(ControllerCall):
    """See the module's docstring."""

    _body_ended: bool = False
    _head_sent: bool = False
    _chunked: bool = False

    def __init__(self, state: State, client: Client, request: Request) -> None:
        super().__init__(state, client, request)
        self._pending: list[bytes] = []

    # -- Handler

    def start(self) -> None:
        super().start()
        if self._connecting is not None and self.client is not None:
            self.client.pause_reading()

    def body(self, data: bytes) -> None:
        if self._conn is not None:
            self._progress_s = time.monotonic()
            self._conn.write_body(data)
        else:
            self._pending.append(data)

    def body_end(self) -> None:
        self._body_ended = True
        if self._conn is not None:
            self._conn.end_body()

    def client_paused(self, paused: bool) -> None:
        if self._conn is not None:
            if paused:
                self._conn.pause_reading()
            else:
                self._progress_s = time.monotonic()
                self._conn.resume_reading()

    def tick(self, now_s: float) -> None:
        client = self.client
        if client is not None and not client.write_paused and self.request.complete:
            super().tick(now_s)

    # -- towards the controller

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        super()._connected(result)
        if self._conn is not None and self.client is not None:
            self.client.resume_reading()

    def _send(self, conn: UpstreamConnection) -> None:
        self._progress_s = time.monotonic()
        request = self.request
        owes = CHUNKED if request.chunked else request.content_length or 0
        conn.start(self, wire.controller_head(request, self.state.token), owes)
        pending, self._pending = self._pending, []
        for data in pending:
            conn.write_body(data)
        if self._body_ended:
            conn.end_body()

    def _is_repeatable(self) -> bool:
        """Also requires the whole body to be still here; a forwarded body is not."""
        request = self.request
        return request.method == b"GET" and not request.chunked and not request.content_length

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
        client = self.client
        if client is None:
            return
        self._progress_s = time.monotonic()
        status = conn.status
        if self._head_sent:
            self._write(body, done)
        elif status >= 400:
            if not self._keep(body, ERROR_BODY_BYTES):
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
            if self.request.head_only:
                self._end_at_head()
            else:
                self._write(body, done)

    def _broken_off(self) -> None:
        self._fail(
            HttpError(
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
        extra += request.more_headers
        extra += cookies(conn.headers, self.state.config.tls_cert_path is not None)
        no_body = bodyless or request.head_only
        client.write(
            wire.response_head(
                conn.status,
                request.request_id,
                length=None if bodyless or length is None else int(length),
                chunked=self._chunked,
                close=not client.will_keep_alive or (length is None and not self._chunked and not no_body),
                processing_s=request.first_byte_s - request.received_s,
                extra=extra,
            )
        )

    def _end_at_head(self) -> None:
        """HEAD was asked for. The rest of the controller's answer, which may be an endless stream, is not read."""
        client, self.client = self.client, None
        assert client is not None
        self._drop()
        client.finished(keep_alive=True)

    def _write(self, body: bytes, done: bool) -> None:
        client = self.client
        assert client is not None
        self.request.sent_bytes += len(body)
        if self._chunked:
            data = b"%b%b" % (wire.chunk(body) if body else b"", wire.LAST_CHUNK if done else b"")
        else:
            data = body
        if data:
            client.write(data)
        if done:
            self.client = None
            client.finished(keep_alive=self._chunked or self.request.version == "1.1")

    def _fail(self, error: HttpError) -> None:
        client, self.client = self.client, None
        if client is None:
            return
        if self._head_sent:
            client.abort_response()
        else:
            client.answer_error(error)


class WholeRelay(Relay):
    """For a request whose body is already buffered because it was checked."""

    def start(self) -> None:
        # Whatever framing the client used, the length is now known.
        request = self.request
        request.content_length, request.chunked = sum(map(len, request.chunks)), False
        super().start()
        for data in request.chunks:
            self.body(data)
        self.body_end()
