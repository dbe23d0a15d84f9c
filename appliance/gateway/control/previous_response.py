"""One request that goes on from an earlier response: the controller is asked for the items before it, and then it is an
inference request like any other, with the whole conversation as its input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

from appliance.gateway.access.request import Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import ApiError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.handler import Handler
from appliance.gateway.http.upstream import UpstreamConnection, cancel
from appliance.gateway.payload.request_check import Checked, check_body
from appliance.gateway.payload.transcript import joined
from appliance.gateway.state.state import State


class PreviousResponse(Handler):
    """Answers until the items are there; then whoever `go_on` returns, which may raise ApiError."""

    def __init__(
        self,
        state: State,
        client: Client,
        request: Request,
        checked: Checked,
        go_on: Callable[[Client, Request, Checked], Handler],
    ) -> None:
        self.state = state
        self.client: Client | None = client
        self.request = request
        self.checked = checked
        self._go_on_with = go_on
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._since_s = time.monotonic()

    # -- Handler

    def start(self) -> None:
        pool, path = self.state.pool, self.state.config.controller_socket
        conn = pool.acquire(path)
        if conn is not None:
            self._connected(conn)
        else:
            self._connecting = pool.connect(path, self._connected, wait_s=self.state.limits.controller_wait_s)

    def body(self, data: bytes) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def body_end(self) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def client_lost(self) -> None:
        self.client = None
        self._drop()

    def client_paused(self, paused: bool) -> None:
        return

    def cancel(self, error: ApiError) -> None:
        self._drop()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        if now_s - self._since_s > self.state.limits.upstream_silence_s:
            self.cancel(ApiError(504, "The controller did not answer in time.", kind="server_error", code="timeout"))

    # -- the controller

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if isinstance(result, OSError):
            self.state.metrics.events["controller_away"] += 1
            self._fail(
                errors.unavailable("The controller of this box is restarting. Please retry.", "controller_away", 2)
            )
        elif self.client is None:
            result.abort()
        else:
            self._conn = result
            transcript = self.checked.transcript
            assert transcript is not None
            path = b"/internal/responses/context?id=%b" % quote(transcript.previous_id, safe="").encode()
            result.start(self, wire.asked_head(path, self.request, self.state.token))

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        self._kept.append(body)
        self._kept_bytes += len(body)
        limit = self.state.limits.inference_body_bytes
        if done:
            self._conn = None
        if self._kept_bytes > limit:
            self._drop()
            self._fail(errors.body_too_large(limit))
        elif done:
            answer = b"".join(self._kept)
            if conn.status == 200:
                self._go_on(answer)
            else:
                self._fail(errors.from_upstream(conn.status, answer))

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        if self.client is None:
            return
        if conn.reused and not conn.answered:
            self.start()
            return
        self._fail(errors.unavailable("The controller of this box is restarting. Please retry.", "controller_away", 2))

    def upstream_paused(self, paused: bool) -> None:
        return

    # -- and then

    def _go_on(self, earlier: bytes) -> None:
        client, request, state = self.client, self.request, self.state
        transcript = self.checked.transcript
        assert transcript is not None and request.route is not None
        if client is None:
            return
        own = request.chunks[0]
        body = joined(own, transcript.input, earlier)
        try:
            if len(body) > state.limits.inference_body_bytes:
                raise errors.body_too_large(state.limits.inference_body_bytes)
            state.take_body(request, len(body) - len(own))
            checked = check_body(request.route, body, state.limits)
            request.chunks = [body]
            transcript.has_previous = True
            checked.transcript = transcript
            handler = self._go_on_with(client, request, checked)
        except ApiError as error:
            # Only the body that was made here is too large, and the client's own connection is in order.
            error.close = False
            self._fail(error)
            return
        self.client = None
        client.active = handler
        handler.start()

    def _fail(self, error: ApiError) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.answer_error(error)

    def _drop(self) -> None:
        cancel(self._connecting, self._conn)
        self._connecting = self._conn = None
