"""Defines the interface of a handler, which answers one client request: inference, a relay to the controller, a
scrape."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.upstream import UpstreamListener


@mypyc_attr(allow_interpreted_subclasses=True)
class Handler(UpstreamListener):
    """A handler calls `Client.finished` exactly once unless `client_lost` came first. Override only the needed
    methods."""

    def start(self) -> None:
        """Start answering: it is this request's turn on the connection."""
        raise NotImplementedError

    def body(self, data: bytes) -> None:
        """More of a streamed body. A buffered body was complete before `start`."""
        raise AssertionError("a buffered request starts when its body is complete")

    def body_end(self) -> None:
        """The streamed body is complete."""
        raise AssertionError("a buffered request starts when its body is complete")

    def client_lost(self) -> None:
        """The client is gone: write nothing more."""
        raise NotImplementedError

    def client_paused(self, paused: bool) -> None:
        """The client stopped (or resumed) accepting bytes."""
        return

    def cancel(self, error: HttpError) -> None:
        """End the request from outside (revoked key, shutdown) and tell the client."""
        raise NotImplementedError

    def tick(self, now_s: float) -> None:
        """Called a few times a second for time-driven work (monotonic seconds)."""
        raise NotImplementedError
