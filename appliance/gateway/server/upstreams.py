"""Connections to engines and the controller: an aiohttp session for each address; how an engine gives no answer."""

from __future__ import annotations

import enum
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from runtime.network.mutual_tls import mutual_tls, watched_socket

_KEEPALIVE_S: Final = 5.0
"""Engines keep idle connections for an hour, so that none is used that its engine is just closing; here those of a rush
do not stay longer than it lasts."""
_READ_BYTES: Final = 256 * 1024
_CONNECT_S: Final = 5.0
_HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)


class Sessions:
    """One aiohttp session per Unix socket, or https://HOST:PORT of an engine on another machine."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def of(self, address: str, *, lasting: bool = True) -> aiohttp.ClientSession:
        """lasting: connections are used again; not where the other side may be closing one under a request that must
        not be sent twice."""
        session = self._sessions.get(address)
        if session is None:
            local = address.startswith("/")
            kept: dict[str, Any] = {"keepalive_timeout": _KEEPALIVE_S} if lasting else {"force_close": True}
            session = self._sessions[address] = aiohttp.ClientSession(
                "http://engine" if local else address,
                connector=aiohttp.UnixConnector(address, limit=0, **kept) if local else _to_machine(**kept),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=_READ_BYTES,
                max_line_size=32 * 1024,
                max_field_size=32 * 1024,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Asked to close, a server that refuses a body unread cuts off its own answer.
                headers=None if lasting else {"Connection": "keep-alive"},
            )
        return session

    async def keep(self, addresses: Collection[str]) -> None:
        """Closes the sessions of addresses that are not among these."""
        gone = [self._sessions.pop(address) for address in list(self._sessions) if address not in addresses]
        for session in gone:
            await session.close()


def _to_machine(**kept: Any) -> aiohttp.TCPConnector:
    context = mutual_tls(ssl.PROTOCOL_TLS_CLIENT)
    return aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=watched_socket, **kept)


async def read_up_to(content: aiohttp.StreamReader, most: int) -> bytes:
    """A body, or its first `most` bytes: a single `read` returns what has come."""
    body = b""
    while len(body) < most and (more := await content.read(most - len(body))):
        body += more
    return body


class EngineFailure(enum.Enum):
    """Why an engine gave no answer; the text is what the log says."""

    UNREACHED = "cannot reach the engine"
    """It got no byte of the request."""
    DIED = "the engine broke off"
    BROKEN = "the engine's answer is not whole"
    """It is no HTTP, or ends without its ending; others may still use the engine."""
    MOVED = "the engine serves another model by now"


class AttemptFailed(Exception):
    """error: what the client gets if the request is not sent again."""

    def __init__(self, reason: EngineFailure, error: HttpError | None = None) -> None:
        super().__init__(reason.value)
        self.reason, self.error = reason, error or errors.engine_failed()


@asynccontextmanager
async def answer_of(
    session: aiohttp.ClientSession, path: str, headers: Mapping[str, str], body: bytes, silence_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The engine's answer; leaving early closes its connection, by which vLLM aborts the request.

    Raises AttemptFailed, also where the answer breaks off, and HttpError 504. silence_s: how long an engine may send
    nothing."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
    try:
        async with session.post(path, data=body, headers=headers, timeout=timeout) as response:
            yield response
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise AttemptFailed(EngineFailure.UNREACHED) from error
    except aiohttp.SocketTimeoutError as error:
        raise errors.engine_failed(504) from error  # the request itself asks for too much
    except aiohttp.ClientResponseError as error:
        raise AttemptFailed(EngineFailure.BROKEN) from error
    except (aiohttp.ClientError, OSError) as error:
        raise AttemptFailed(EngineFailure.DIED) from error


async def is_alive(session: aiohttp.ClientSession) -> bool:
    """Whether the engine's core lives, by vLLM's own check; one that is too busy to say so does."""
    try:
        async with session.get("/health", timeout=_HEALTH_TIMEOUT) as response:
            return response.status == 200
    except TimeoutError:
        return True
    except (aiohttp.ClientError, OSError):
        return False
