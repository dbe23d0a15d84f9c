"""Listens on a port that strangers can reach, and holds few connections of whom it does not know yet who they are.

`asyncio.start_server` with TLS takes every connection and gives each its time for the handshake: a stranger who
connects a thousand times and says nothing has a thousand descriptors of the process for a quarter of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

MOST = 256
GRACE_S = 2.0
"""While the most are here, whoever has been here for so long without a word gives its place to the next."""
_AGAIN_S = 0.05
_NO_ROOM_S = 1.0
_BACKLOG = 256

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Newcomers:
    """Each connection is a newcomer from the first packet until `serve` calls `is_known`, or ends. Others wait in the
    kernel's queue."""

    def __init__(
        self, serve: Serve, *, context: ssl.SSLContext | None, handshake_s: float, line_bytes: int, most: int = MOST
    ):
        self._serve, self._context, self._handshake_s = serve, context, handshake_s
        self._line_bytes, self._most = line_bytes, most
        self._socket: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._since_s: dict[asyncio.Task[None], float] = {}  # the oldest first
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self, address: str, port: int) -> tuple[str, int]:
        """Listen; returns address and port. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, where = found[0]
        self._socket = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._listening = loop.create_task(self._listen(self._socket), name=f"newcomers at {address}")
        return self._socket.getsockname()[:2]

    async def stop(self) -> None:
        """No further connection is taken; those that are there go on."""
        if self._listening is not None and self._socket is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._socket.close()

    def is_known(self) -> None:
        """The connection of the current task has proved who it is: it may stay as long as it likes."""
        task = asyncio.current_task()
        assert task is not None
        self._since_s.pop(task, None)

    async def _listen(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._since_s) >= self._most:
                self._end_oldest()
                await asyncio.sleep(_AGAIN_S)
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # the newcomer has left already, or there are no descriptors
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(_NO_ROOM_S)
                continue
            task = loop.create_task(self._talk(connection))
            self._since_s[task] = time.monotonic()
            self._talks.add(task)
            task.add_done_callback(self._ended)

    def _end_oldest(self) -> None:
        now_s = time.monotonic()
        for task, since_s in list(self._since_s.items()):
            if now_s - since_s < GRACE_S:
                return
            task.cancel()

    async def _talk(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=self._line_bytes, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        secure: dict[str, Any] = {}
        if self._context is not None:
            secure = {"ssl": self._context, "ssl_handshake_timeout": self._handshake_s}
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, **secure)
        except OSError as error:
            log.info("a connection ended before it was one: %s", error)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._serve(reader, writer)
            # TLS waits for the other side's farewell for half a minute. A stranger who gives none has a descriptor
            # until then, and counts as long.
            if not writer.is_closing():
                writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        except BaseException:
            # Not by the transport: one of TLS that was closed twice has forgotten its connection.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._since_s.pop(task, None)
        self._talks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a talk with a newcomer failed", exc_info=error)
