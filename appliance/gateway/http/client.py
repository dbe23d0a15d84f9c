"""Defines a client connection as handlers see it: the active request, and how to write and finish answers."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, ip_address

from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.connection import Connection
from appliance.gateway.http.handler import Handler
from appliance.gateway.routing.table import Caller


def network_of(address: str) -> str:
    """`Client.network` of an address as sockets give it."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ":".join(found.exploded.split(":")[:4]))


class Client(Connection):
    """`server.client_connection.ClientConnection` is the only implementation; handlers use only this interface.

    active: the handler of the current request. write_paused: the client does not accept more bytes now.
    """

    active: Handler | None = None
    write_paused: bool = False

    # -- for who answers

    @property
    def network(self) -> str:
        """Where it comes from: its address, of an IPv6 one the first half, for the other is the client's choice. Empty
        if it is gone."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return network_of(str(peer[0])) if peer else ""

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
