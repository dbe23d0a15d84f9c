"""Defines a client connection as handlers see it: the active request, and how to write and finish answers."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.connection import Connection
from appliance.gateway.http.handler import Handler
from appliance.gateway.routing.table import Caller


class Client(Connection):
    """`server.client_connection.ClientConnection` is the only implementation; handlers use only this interface.

    active: the handler of the current request. write_paused: the client does not accept more bytes now.
    """

    active: Handler | None = None
    write_paused: bool = False

    # -- for who answers

    @property
    def will_keep_alive(self) -> bool:
        """Whether the connection outlives the response that is being written."""
        raise NotImplementedError

    def answer(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send a whole response of the gateway's own and finish the active request."""
        raise NotImplementedError

    def answer_error(self, error: HttpError) -> None:
        """Send an error as the whole response and finish the active request."""
        raise NotImplementedError

    def abort_response(self) -> None:
        """Abort a response that cannot be completed: the client sees a failed transfer, not a short one."""
        raise NotImplementedError

    def finished(self, *, keep_alive: bool, now_s: float = 0.0) -> None:
        """The active request's response is completely written. now_s: the monotonic clock, where it was just read."""
        raise NotImplementedError

    # -- for the process

    def tick(self, now_s: float) -> None:
        """Called a few times a second: everything here that depends on time."""
        raise NotImplementedError

    def keys_changed(self, callers: Mapping[str, Caller]) -> None:
        """Apply a new table: end all requests of removed keys, complete or not. callers: by id.

        Requests that have not begun are checked against their key's new row.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Shut down: close idle connections now, others after their answer."""
        raise NotImplementedError
