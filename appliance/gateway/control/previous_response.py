"""Handles a request with `previous_response_id`: fetches the earlier items from the controller, then continues as an
ordinary inference request with the whole conversation as its input."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from appliance.gateway.access.request import Request
from appliance.gateway.answers.transcript import joined
from appliance.gateway.control.controller_call import ControllerCall
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.handler import Handler
from appliance.gateway.http.upstream import UpstreamConnection
from appliance.gateway.payload.request_check import Checked, check_body
from appliance.gateway.state.state import State


class PreviousResponse(ControllerCall):
    """The handler until the items have arrived; then the one that `go_on` returns, which may raise HttpError."""

    def __init__(
        self,
        state: State,
        client: Client,
        request: Request,
        checked: Checked,
        go_on: Callable[[Client, Request, Checked], Handler],
    ) -> None:
        super().__init__(state, client, request)
        self.checked = checked
        self._go_on_with = go_on

    def _send(self, conn: UpstreamConnection) -> None:
        transcript = self.checked.transcript
        assert transcript is not None
        path = b"/internal/responses/context?id=%b" % quote(transcript.previous_id, safe="").encode()
        conn.start(self, wire.get_head(path, self.request, self.state.token))

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        limit = self.state.limits.inference_body_bytes
        if done:
            self._conn = None
        if not self._keep(body, limit):
            self._drop()
            self._fail(errors.body_too_large(limit))
        elif done:
            answer = b"".join(self._kept)
            if conn.status == 200:
                self._go_on(answer)
            else:
                self._fail(errors.from_upstream(conn.status, answer))

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
        except HttpError as error:
            # Only the body built here is too large; the client's own connection is fine.
            error.close = False
            self._fail(error)
            return
        self.client = None
        client.active = handler
        handler.start()
