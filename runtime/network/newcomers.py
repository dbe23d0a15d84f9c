"""Takes the connections of strangers: of those of whom it does not know yet who they are it holds few, and they keep
nobody out.

asyncio's servers with TLS show a connection only when its handshake is complete, and give each its time for that: a
stranger who connects a thousand times and says nothing has a thousand descriptors of the process, whatever it allows
its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial

from runtime.background_tasks import BackgroundTasks, RunningTasks

log = logging.getLogger(__name__)

MOST = 256
GRACE_S = 2.0
_AGAIN_S = 0.05
_NO_ROOM_S = 0.1
_BACKLOG = 2048

Meet = Callable[[socket.socket], Awaitable[None]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Newcomers:
    """Each connection is a newcomer from its first packet until `meet` returns, or calls `is_known`.

    meet: all that happens on a connection that was accepted; cancelled when it gives its place. most: newcomers held.
    Beyond it the one that came first gives its place to the next, as soon as it has been here for `grace_s`; until then
    the next waits in the kernel's queue. gave_place: called each time.
    """

    def __init__(
        self,
        meet: Meet,
        *,
        most: int = MOST,
        grace_s: float = GRACE_S,
        background: BackgroundTasks | None = None,
        gave_place: Callable[[], None] = lambda: None,
    ):
        self._meet, self._most, self._grace_s, self._gave_place = meet, most, grace_s, gave_place
        self._background = background or BackgroundTasks()
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._since_s: dict[asyncio.Task[None], float] = {}  # the oldest first
        self._meetings = RunningTasks()

    def __len__(self) -> int:
        return len(self._since_s)

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> tuple[str, int]:
        """On all addresses of the host. Returns the first and the port, the same for all. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, where in dict.fromkeys((family, address[0]) for family, *_, address in found):
                made = socket.create_server((where, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
                made.setblocking(False)
                self._sockets.append(made)
                port = made.getsockname()[1]
        except OSError:
            await self.stop()
            raise
        for made in self._sockets:
            self._accepting.append(self._background.keep(f"connections: {host}", partial(self._accept, made)))
        return self._sockets[0].getsockname()[0], port

    async def stop(self) -> None:
        """Take no more connections; those that are here go on."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for made in self._sockets:
            made.close()
        self._accepting, self._sockets = [], []

    def is_known(self) -> None:
        """The connection of the current task has proved who it is: it may stay as long as it likes."""
        task = asyncio.current_task()
        assert task is not None
        self._since_s.pop(task, None)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # it has left already, or there are no descriptors
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(_NO_ROOM_S)
                continue
            await self._make_room()
            task = self._meetings.add(loop.create_task(self._met(connection)))
            self._since_s[task] = time.monotonic()
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)  # it begins before the next is taken, and closes its connection whatever comes

    async def _make_room(self) -> None:
        while len(self._since_s) >= self._most:
            oldest, since_s = next(iter(self._since_s.items()))
            if time.monotonic() - since_s < self._grace_s:
                await asyncio.sleep(_AGAIN_S)
                continue
            del self._since_s[oldest]
            oldest.cancel()
            self._gave_place()

    async def _met(self, connection: socket.socket) -> None:
        try:
            await self._meet(connection)
        except BaseException:
            # Not by the transport: one of TLS that was closed twice has forgotten its connection.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._since_s.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection failed", exc_info=error)


def talk(serve: Serve, *, context: ssl.SSLContext | None, handshake_s: float, line_bytes: int) -> Meet:
    """A meeting over streams, with TLS if there is a context: a newcomer until `serve` returns or says that it is
    known. Lines have at most `line_bytes`."""

    async def meet(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=line_bytes, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        timeout_s = None if context is None else handshake_s
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            log.info("a connection broke off in its handshake: %s", error)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await serve(reader, writer)
        # TLS waits for the other side's farewell for half a minute. A stranger who gives none has a descriptor until
        # then, and counts as long.
        if not writer.is_closing():
            writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    return meet
