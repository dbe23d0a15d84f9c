"""Sends one request to the controller on behalf of a client: gets a connection, waits for the answer, and drops both
when the client is gone, is cut off, or has its answer."""

from __future__ import annotations

import asyncio
import time

from appliance.gateway.access.request import Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.client import Client
from appliance.gateway.http.handler import Handler
from appliance.gateway.http.upstream import UpstreamConnection, cancel
from appliance.gateway.state.state import State


class ControllerCall(Handler):
    """See the module's docstring. `client` is None once the client is gone or the response is finished."""

    _kept_bytes: int = 0
    _progress_s: float = 0.0

    def __init__(self, state: State, client: Client, request: Request) -> None:
        self.state = state
        self.client: Client | None = client
        self.request = request
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._kept: list[bytes] = []

    # -- what is particular to each

    def _send(self, conn: UpstreamConnection) -> None:
        """Write the request."""
        raise NotImplementedError

    def _is_repeatable(self) -> bool:
        """Whether it is idempotent: only then may it use a connection that the controller may be closing."""
        return True

    def _wait_s(self) -> float:
        """Seconds to wait for a restarting controller."""
        return self.state.limits.controller_wait_s

    def _broken_off(self) -> None:
        """The controller was reached but ended before its answer was complete."""
        self._fail(_restarting())

    def _away(self) -> None:
        """The controller cannot be reached."""
        self.state.metrics.events["controller_away"] += 1
        self._fail(_restarting())

    def _fail(self, error: HttpError) -> None:
        """Send the error to the client if it is still connected, and finish."""
        client, self.client = self.client, None
        if client is not None:
            client.answer_error(error)

    # -- Handler

    def start(self) -> None:
        self._progress_s = time.monotonic()
        pool, path = self.state.pool, self.state.config.controller_socket
        conn = pool.acquire(path) if self._is_repeatable() else None
        if conn is None:
            self._connecting = pool.connect(path, self._connected, wait_s=self._wait_s())
        else:
            self._conn = conn
            self._send(conn)

    def client_lost(self) -> None:
        self.client = None
        self._drop()

    def cancel(self, error: HttpError) -> None:
        self._drop()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        if now_s - self._progress_s > self.state.limits.upstream_silence_s:
            self.cancel(HttpError(504, "The controller did not answer in time.", kind="server_error", code="timeout"))

    # -- the connection

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if isinstance(result, OSError):
            self._away()
        elif self.client is None:
            result.abort()
        else:
            self._conn = result
            self._send(result)

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        if self.client is None:
            return
        if conn.reused and not conn.answered and self._is_repeatable():
            self.start()
        else:
            self._broken_off()

    def _keep(self, body: bytes, most_bytes: int) -> bool:
        """Buffer the answer. Returns whether it is still within `most_bytes`."""
        self._kept.append(body)
        self._kept_bytes += len(body)
        return self._kept_bytes <= most_bytes

    def _drop(self) -> None:
        cancel(self._connecting, self._conn)
        self._connecting = self._conn = None


def _restarting() -> HttpError:
    return errors.unavailable("The controller of this box is restarting. Please retry.", "controller_away", 2)
