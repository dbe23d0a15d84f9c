"""Base of connections to clients and to engines: sends bytes at the end of an event loop turn, can pause reading."""

from __future__ import annotations

from appliance.gateway.http.outbox import Writer


class Connection(Writer):
    """See the module's docstring."""

    read_paused: bool = False

    def pause_reading(self) -> None:
        transport = self.transport
        if transport is not None and not self.read_paused and not transport.is_closing():
            self.read_paused = True
            transport.pause_reading()

    def resume_reading(self) -> None:
        transport = self.transport
        if transport is not None and self.read_paused:
            self.read_paused = False
            if not transport.is_closing():
                transport.resume_reading()
