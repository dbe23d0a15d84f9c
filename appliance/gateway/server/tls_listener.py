"""Takes TLS connections: each counts from its first packet, and few whose handshake is not complete are held.

An event loop that listens with a TLS context shows a connection only when its handshake is complete, and waits a minute
for that. Whoever connected 17,000 times and said nothing had all descriptors of a gateway, whatever `max_connections`
says.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableMapping
from functools import partial

from runtime.background_tasks import BackgroundTasks

log = logging.getLogger("appliance.gateway")

_BACKLOG = 2048
_NO_ROOM_S = 0.1


def newcomers_of(connections: int) -> int:
    """How many whose handshake is not complete are held beside so many whose is."""
    return max(8, connections // 8)


class TlsListener:
    """client: makes the protocol of a connection whose handshake is complete. most: of those whose is not; beyond it
    the one that came first gives its place. handshake_s: how long each has. events: counters, by name."""

    def __init__(
        self,
        client: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        most: int,
        handshake_s: float,
        background: BackgroundTasks,
        events: MutableMapping[str, int] | None = None,
    ) -> None:
        self._client, self._context = client, context
        self._most, self._handshake_s = most, handshake_s
        self._background = background
        self._events = Counter[str]() if events is None else events
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._newcomers: OrderedDict[asyncio.Task[None], None] = OrderedDict()

    def __len__(self) -> int:
        """Connections whose handshake is not complete."""
        return len(self._newcomers)

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """On all addresses of the host. Returns the port, the same for all. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, where in dict.fromkeys((family, address[0]) for family, *_, address in found):
                made = socket.create_server((where, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
                made.setblocking(False)
                self._sockets.append(made)
                port = made.getsockname()[1]
        except OSError:
            self.close()
            raise
        for made in self._sockets:
            self._accepting.append(self._background.keep("TLS connections", partial(self._accept, made)))
        return port

    def close(self) -> None:
        """Take no more connections; those that are here go on."""
        for task in self._accepting:
            task.cancel()
        for made in self._sockets:
            made.close()
        self._accepting, self._sockets = [], []

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # it has left already, or there are no descriptors
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(_NO_ROOM_S)
                continue
            while len(self._newcomers) >= self._most:
                oldest, _ = self._newcomers.popitem(last=False)
                self._events["connection_gave_place"] += 1
                oldest.cancel()
            task = loop.create_task(self._meet(connection), name="TLS handshake")
            self._newcomers[task] = None
            task.add_done_callback(self._met)

    async def _meet(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._client, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:  # no TLS, too slow, or gone; an SSLError is one
            self._events["tls_failed"] += 1
            log.debug("a TLS handshake failed: %s", error)
        except asyncio.CancelledError:
            connection.close()
            raise

    def _met(self, task: asyncio.Task[None]) -> None:
        self._newcomers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a TLS handshake failed", exc_info=error)
