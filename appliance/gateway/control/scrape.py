"""Answers one scrape of /metrics with the gateway's series, and the controller's if it answers."""

from __future__ import annotations

import time

from appliance.gateway.access.request import Request
from appliance.gateway.control.controller_call import ControllerCall
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.upstream import UpstreamConnection
from appliance.gateway.observe.exposition import CONTENT_TYPE
from appliance.gateway.state.reports import metrics_text
from appliance.gateway.state.state import State

CONTROLLER_PATH = b"/admin/v1/metrics"
CONTROLLER_WAIT_S = 2.0
CONTROLLER_BYTES = 8 << 20


class Scrape(ControllerCall):
    """The client always gets the gateway's own series, even if the controller fails."""

    def __init__(self, state: State, client: Client, request: Request) -> None:
        super().__init__(state, client, request)
        self._deadline_s = time.monotonic() + CONTROLLER_WAIT_S

    def tick(self, now_s: float) -> None:
        if now_s >= self._deadline_s:
            self._drop()
            self._answer(b"")

    def _is_repeatable(self) -> bool:
        # It always opens its own connection: keeping it for the next scrape would add an idle connection every time.
        return False

    def _wait_s(self) -> float:
        return 0.0

    def _send(self, conn: UpstreamConnection) -> None:
        conn.start(self, wire.get_head(CONTROLLER_PATH, self.request, self.state.token))

    def _away(self) -> None:
        self._answer(b"")

    def _broken_off(self) -> None:
        self._answer(b"")

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        fits = self._keep(body, CONTROLLER_BYTES)
        if done or not fits:
            self._drop()
            self._answer(b"".join(self._kept) if done and conn.status == 200 else b"")

    def _answer(self, of_controller: bytes) -> None:
        client, self.client = self.client, None
        if client is not None:
            own = metrics_text(self.state, controller_up=bool(of_controller))
            client.answer(200, CONTENT_TYPE, b"%b%b" % (own, of_controller))
