"""One scrape of /metrics: the gateway's series, and the controller's while it answers."""

from __future__ import annotations

import asyncio
import time

from appliance.gateway.access.request import Request
from appliance.gateway.core.errors import ApiError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.handler import Handler
from appliance.gateway.http.upstream import UpstreamConnection, cancel
from appliance.gateway.observe.exposition import CONTENT_TYPE
from appliance.gateway.state.reports import metrics_text
from appliance.gateway.state.state import State

CONTROLLER_PATH = b"/admin/v1/metrics"
CONTROLLER_WAIT_S = 2.0
CONTROLLER_BYTES = 8 << 20


class Scrape(Handler):
    """Whatever becomes of the controller, the client gets the gateway's own series."""

    __slots__ = ("state", "client", "request", "_conn", "_connecting", "_kept", "_kept_bytes", "_deadline_s")

    def __init__(self, state: State, client: Client, request: Request) -> None:
        self.state = state
        self.client: Client | None = client
        self.request = request
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._deadline_s = time.monotonic() + CONTROLLER_WAIT_S

    # -- Handler

    def start(self) -> None:
        self._connecting = self.state.pool.connect(self.state.config.controller_socket, self._connected)

    def body(self, data: bytes) -> None:
        return

    def body_end(self) -> None:
        return

    def client_lost(self) -> None:
        self.client = None
        self._drop()

    def client_paused(self, paused: bool) -> None:
        return

    def cancel(self, error: ApiError) -> None:
        client, self.client = self.client, None
        self._drop()
        if client is not None:
            client.answer_error(error)

    def tick(self, now_s: float) -> None:
        if self.client is not None and now_s >= self._deadline_s:
            self._drop()
            self._answer(b"")

    # -- the controller

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if isinstance(result, OSError):
            self._answer(b"")
        elif self.client is None:
            result.abort()
        else:
            self._conn = result
            result.start(self, wire.asked_head(CONTROLLER_PATH, self.request, self.state.token))

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        self._kept.append(body)
        self._kept_bytes += len(body)
        if done:
            # A scrape always has a connection of its own: one kept for the next would only be one more, every time.
            self._drop()
            self._answer(b"".join(self._kept) if conn.status == 200 else b"")
        elif self._kept_bytes > CONTROLLER_BYTES:
            self._drop()
            self._answer(b"")

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        self._answer(b"")

    def upstream_paused(self, paused: bool) -> None:
        return

    def _answer(self, of_controller: bytes) -> None:
        client, self.client = self.client, None
        if client is not None:
            own = metrics_text(self.state, controller_up=bool(of_controller))
            client.answer(200, CONTENT_TYPE, b"%b%b" % (own, of_controller))

    def _drop(self) -> None:
        cancel(self._connecting, self._conn)
        self._connecting = self._conn = None
