"""Protocol by which an engine requests an adapter that is neither in shared memory nor in the library on disk.

The protocol runs over a Unix socket of the box: one JSON object per line, one request per connection.

    engine -> {"adapter": "NAME@VERSION"}
    box    -> {"path": "/dev/shm/..."}      the complete adapter directory, leased until the engine disconnects
            | {"error": "..."}              no tier has a complete copy, or shared memory is full
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from runtime.network import private_socket

log = logging.getLogger(__name__)

RETRY_S = 0.2


class AdapterUnavailable(Exception):
    """The box cannot provide the adapter, or did not provide it within the timeout; the message says why."""


class AdapterServer:
    """The box's side of the protocol: serves engines from `start` to `stop`. Call all methods on one event loop.

    `lease(model, version)` copies an adapter into shared memory and returns a lease with the copy's `path`. Errors
    listed in `refusals` reach the engine as text.
    """

    def __init__(
        self, path: Path, lease: Callable[[str, str], Awaitable[Any]], refusals: tuple[type[Exception], ...]
    ) -> None:
        self._path, self._lease, self._refusals = path, lease, refusals
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on the socket; replace the socket file of a killed process, if there is one."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, sock=private_socket(self._path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                model, _, version = json.loads(await reader.readline())["adapter"].rpartition("@")
                with await self._lease(model, version) as lease:
                    writer.write(json.dumps({"path": str(lease.path)}).encode() + b"\n")
                    await reader.read()  # wait until the engine has its own lease and disconnects
            except self._refusals as error:
                log.error("an engine did not receive the adapter that it requested: %s", error)
                writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                log.error("invalid adapter request: %r", error)


@contextlib.asynccontextmanager
async def brought_in(socket_path: str, adapter: str, timeout_s: float) -> AsyncIterator[str]:
    """Yield the shared-memory directory of `adapter` ("NAME@VERSION"), which is leased while the context is open.

    Retries while the controller restarts. Raises AdapterUnavailable.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            while writer is None:
                try:
                    reader, writer = await asyncio.open_unix_connection(socket_path)
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(RETRY_S)
            writer.write(json.dumps({"adapter": adapter}).encode() + b"\n")
            answer = json.loads(await reader.readline() or b"{}")
        if "path" not in answer:
            raise AdapterUnavailable(f"{adapter}: {answer.get('error', 'the controller closed the connection')}")
        yield answer["path"]
    except TimeoutError as error:
        raise AdapterUnavailable(f"{adapter} did not arrive within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise AdapterUnavailable(f"{adapter}: {error}") from error
    finally:
        if writer is not None:
            writer.close()
