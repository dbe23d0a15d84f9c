"""Sends requests to engines over their Unix sockets, with aiohttp."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

_HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)


class AttemptFailed(Exception):
    """error: what the client gets if it is not tried again. sent: the engine may have had it. died: the engine did, or
    the path to it broke. blame: others avoid the replica for a moment."""

    def __init__(self, error: HttpError, *, sent: bool = True, died: bool = False, blame: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.sent = sent
        self.died = died
        self.blame = blame


@asynccontextmanager
async def answer_of(
    session: aiohttp.ClientSession, path: str, headers: Mapping[str, str], body: bytes, silence_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The engine's answer; leaving early closes its connection, by which vLLM aborts the request.

    Raises AttemptFailed, also where the answer breaks off. silence_s: how long an engine may send nothing."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=silence_s)
    try:
        async with session.post(f"http://engine{path}", data=body, headers=headers, timeout=timeout) as response:
            yield response
    except aiohttp.ClientConnectorError as error:
        raise AttemptFailed(errors.engine_failed(), sent=False) from error
    except aiohttp.SocketTimeoutError as error:
        raise AttemptFailed(errors.engine_failed(504), blame=False) from error
    except aiohttp.ClientResponseError as error:  # its head or its chunks are no HTTP; others may still use it
        raise AttemptFailed(errors.engine_failed(), blame=False) from error
    except (aiohttp.ClientError, OSError) as error:
        raise AttemptFailed(errors.engine_failed(), died=True) from error


async def is_alive(session: aiohttp.ClientSession) -> bool:
    """Whether the engine's core lives, by vLLM's own check; one that is too busy to say so does."""
    try:
        async with session.get("http://engine/health", timeout=_HEALTH_TIMEOUT) as response:
            return response.status == 200
    except TimeoutError:
        return True
    except (aiohttp.ClientError, OSError):
        return False
