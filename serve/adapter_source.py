"""Asking the box for an adapter that lies neither in shared memory nor in the library on disk.

A Unix socket of the box, one JSON object per line, one question per connection:

    engine -> {"adapter": "NAME@VERSION"}
    box    -> {"path": "/dev/shm/..."}      the adapter's directory, whole, leased until the engine hangs up
            | {"error": "..."}              no tier has it whole, or shared memory is full
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

RETRY_S = 0.2
LINE_BYTES = 16 * 1024


class AdapterUnavailable(Exception):
    """The box cannot bring the adapter in, or did not within the time given; the text says why."""


@contextlib.asynccontextmanager
async def brought_in(socket_path: str, adapter: str, timeout_s: float) -> AsyncIterator[str]:
    """The directory of `adapter` ("NAME@VERSION") in shared memory, which stays there while the context is open.

    A controller that is being restarted is waited for. Raises AdapterUnavailable.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(socket_path)
            writer.write(json.dumps({"adapter": adapter}).encode() + b"\n")
            answer = json.loads(await reader.readline() or b"{}")
        if "path" not in answer:
            raise AdapterUnavailable(f"{adapter}: {answer.get('error', 'the controller went away')}")
        yield answer["path"]
    except TimeoutError as error:
        raise AdapterUnavailable(f"{adapter} was not brought in within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise AdapterUnavailable(f"{adapter}: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _connect(socket_path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_unix_connection(socket_path, limit=LINE_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(RETRY_S)
