"""Collects the writes of one event loop turn and sends them at its end, each connection's in one piece.

A reader sleeps until a write wakes it, and waking is the most expensive part of a write: a fifth of the cost of a plain
request. Further writes find the reader awake. A turn that writes to only one connection loses nothing.

Waking is also the most expensive part of reading. If stream events arrive one by one in quick succession, the loop
rests briefly before it polls again, and then finds several.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

# Writes of this size go out at once: a copy would cost more than waking.
_LARGE_BYTES: Final = 32 * 1024
# A long turn sends its first answers before its end.
_AT_ONCE: Final = 16
# Quick succession: turns with events that follow each other within twice the rest. This delays an event, or a request
# among them, by at most one rest: little compared with the 10 to 50 ms from one token to the next.
_REST_S: Final = 0.001


class Outbox:
    """Connections with unsent bytes."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []
        self._scheduled = False
        self._events = False
        self._events_s = 0.0

    def add(self, writer: Writer) -> None:
        writers = self._writers
        writers.append(writer)
        if len(writers) >= _AT_ONCE:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn_ends)

    def event(self) -> None:
        """The next write is an event in mid-stream."""
        self._events = True

    def _turn_ends(self) -> None:
        self._scheduled = False
        self.flush()
        if self._events:
            self._events = False
            now, last = time.monotonic(), self._events_s
            self._events_s = now
            if now - last < 2 * _REST_S:
                time.sleep(_REST_S)

    def flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class Writer:
    """The write side of a connection. Invariant: with unsent bytes it is in the outbox."""

    _unsent: bytes = b""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        """Send `data` at the end of this turn, after earlier writes; it sends nothing once closed."""
        transport, unsent = self.transport, self._unsent
        if transport is None:
            return
        if unsent:
            data = b"%b%b" % (unsent, data)
        elif len(data) < _LARGE_BYTES:
            self._unsent = data
            self._outbox.add(self)
            return
        if len(data) < _LARGE_BYTES:
            self._unsent = data
        else:
            self._unsent = b""
            transport.write(data)

    def write_event(self, data: bytes) -> None:
        """The same for mid-stream data, which may wait briefly to be sent with more."""
        self._outbox.event()
        self.write(data)

    def flush(self) -> None:
        """Send unsent bytes now."""
        data = self._unsent
        if data:
            self._unsent = b""
            if self.transport is not None:
                self.transport.write(data)

    def close(self) -> None:
        """Close once everything that was written is sent."""
        self.flush()
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close now, whatever is unsent."""
        self._unsent = b""
        if self.transport is not None:
            self.transport.abort()
