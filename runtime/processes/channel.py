"""Sends and receives frames on a lifeline: a 4-byte big-endian length, then that many bytes of UTF-8 JSON.

One connected AF_UNIX stream socket joins a supervisor and the process forked for it. It carries requests to the
process, and answers and events back. End of file means a dead peer; the kernel delivers it even after kill -9.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

from runtime.errors import ChannelClosed

_LENGTH = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "item"):  # numpy and torch scalars
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot travel on a lifeline; send numbers, strings, lists and dicts")


class BlockingChannel:
    """The child's end, for plain threads. `send` may be called from any thread. It takes over the socket."""

    def __init__(self, sock: socket.socket):
        self._connection = Connection(sock.detach())  # whose frames are ours
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises ChannelClosed when the peer is gone."""
        body = encode(message)
        try:
            with self._send_lock:
                self._connection.send_bytes(body)
        except OSError as error:
            raise ChannelClosed("the supervisor is gone") from error

    def receive(self) -> dict[str, Any]:
        """Next message; raises ChannelClosed at end of file."""
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise ChannelClosed("the supervisor is gone") from error

    def close(self) -> None:
        self._connection.close()


class AsyncChannel:
    """The supervisor's end: used inside one asyncio loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, path: str) -> AsyncChannel:
        return cls(*await asyncio.open_unix_connection(path))

    async def send(self, message: dict[str, Any]) -> None:
        """Raises ChannelClosed when the peer is gone."""
        try:
            body = encode(message)
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process is gone") from error

    async def receive(self) -> dict[str, Any]:
        """Next message; raises ChannelClosed at end of file."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            return json.loads(await self._reader.readexactly(*_LENGTH.unpack(head)))
        # After a failed write asyncio raises that write's error here too, not an end of file. When only
        # ConnectionResetError was caught, the death of a child at that moment was never noticed.
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process is gone") from error

    def close(self) -> None:
        self._writer.close()
