"""Sends requests to engines over their Unix sockets, with aiohttp, and says in which way one got no answer."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

_HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)


class Failure(enum.Enum):
    """Why an engine gave no answer; the text is what the log says."""

    UNREACHED = "cannot reach the engine"
    """It got no byte of the request."""
    DIED = "the engine broke off"
    BROKEN = "the engine's answer is not whole"
    """It is no HTTP, or ends without its ending; others may still use the engine."""
    SILENT = "the engine was silent for too long"
    MOVED = "the engine serves another model by now"
    REFUSED = "the engine refused the request"
    """For good: it is not sent again."""


class AttemptFailed(Exception):
    """error: what the client gets if the request is not sent again."""

    def __init__(self, why: Failure, error: HttpError | None = None) -> None:
        super().__init__(why.value)
        self.why, self.error = why, error or errors.engine_failed()


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
        raise AttemptFailed(Failure.UNREACHED) from error
    except aiohttp.SocketTimeoutError as error:
        raise AttemptFailed(Failure.SILENT, errors.engine_failed(504)) from error
    except aiohttp.ClientResponseError as error:
        raise AttemptFailed(Failure.BROKEN) from error
    except (aiohttp.ClientError, OSError) as error:
        raise AttemptFailed(Failure.DIED) from error


async def is_alive(session: aiohttp.ClientSession) -> bool:
    """Whether the engine's core lives, by vLLM's own check; one that is too busy to say so does."""
    try:
        async with session.get("http://engine/health", timeout=_HEALTH_TIMEOUT) as response:
            return response.status == 200
    except TimeoutError:
        return True
    except (aiohttp.ClientError, OSError):
        return False
