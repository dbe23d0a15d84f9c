"""Writes of one turn of the event loop go out together at its end, each connection's in one piece.

Whoever is written to sleeps until it is woken, and waking is the dearest part of a write: a fifth of all that a plain
request cost here. What comes right after finds its reader awake. A turn that writes to one connection only loses
nothing.

Being woken is the dearest part of reading, too. Where events of streams come one by one in quick succession, the loop
rests for a moment before it looks again, and finds several.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

# What is as large as this goes out at once: a copy would cost more than waking.
_LARGE_BYTES: Final = 32 * 1024
# A long turn does not keep its first answers to its end.
_AT_ONCE: Final = 16
# Turns with events that follow each other within twice the rest are a quick succession. An event, or a request that
# comes among so many of them, is later by one rest at most: little beside the 10 to 50 ms from one token to the next.
_REST_S: Final = 0.001


class Outbox:
    """Whose bytes are still to be sent."""

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
        """What is written next is an event in the middle of a stream."""
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
    """A connection as far as it is written to. Invariant: with bytes unsent it stands in the outbox."""

    _unsent: bytes = b""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        """Send `data` at the end of this turn, behind what was written before; nothing is sent once it is closed."""
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
        """The same, of the middle of a stream, which may wait a moment for its neighbours."""
        self._outbox.event()
        self.write(data)

    def flush(self) -> None:
        """Send now what is unsent."""
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
