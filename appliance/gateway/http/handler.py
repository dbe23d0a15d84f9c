"""What answers one request of a client: an inference exchange, a relay to the controller, a scrape."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.upstream import UpstreamListener


@mypyc_attr(allow_interpreted_subclasses=True)
class Handler(UpstreamListener):
    """Calls `Client.finished` exactly once unless `client_lost` came first. What it has no use for, it leaves as it is
    here."""

    def start(self) -> None:
        """Its turn on the connection has come."""
        raise NotImplementedError

    def body(self, data: bytes) -> None:
        """More of a body that is streamed. One that is gathered whole was complete before the start."""
        raise AssertionError("a gathered request starts when its body is complete")

    def body_end(self) -> None:
        """The streamed body is complete."""
        raise AssertionError("a gathered request starts when its body is complete")

    def client_lost(self) -> None:
        """The client is gone: nothing may be written any more."""
        raise NotImplementedError

    def client_paused(self, paused: bool) -> None:
        """The client takes no more bytes for now (or does again)."""
        return

    def cancel(self, error: HttpError) -> None:
        """End the request from outside (revoked key, shutdown) and tell the client."""
        raise NotImplementedError

    def tick(self, now_s: float) -> None:
        """Called a few times a second: whatever depends on time (monotonic seconds)."""
        raise NotImplementedError
