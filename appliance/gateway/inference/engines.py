"""Sends requests to engines over their Unix sockets, with aiohttp."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

_KEEPALIVE_S: Final = 600.0
"""Engines keep idle connections for an hour, so that none is used that its engine is just closing."""
_READ_BYTES: Final = 256 * 1024


class AttemptFailed(Exception):
    """error: what the client gets if it is not tried again. sent: the engine may have had it. died: the engine did, or
    the path to it broke. blame: others avoid the replica for a moment."""

    def __init__(self, error: HttpError, *, sent: bool = True, died: bool = False, blame: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.sent = sent
        self.died = died
        self.blame = blame


class Sessions:
    """One aiohttp session per Unix socket."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def of(self, path: str, *, lasting: bool = True) -> aiohttp.ClientSession:
        """lasting: connections are used again; not where the other side may be closing one under a request that must
        not be sent twice."""
        session = self._sessions.get(path)
        if session is None:
            kept: dict[str, Any] = {"keepalive_timeout": _KEEPALIVE_S} if lasting else {"force_close": True}
            session = self._sessions[path] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=0, **kept),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=_READ_BYTES,
                max_line_size=32 * 1024,
                max_field_size=32 * 1024,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return session

    async def keep(self, paths: Collection[str]) -> None:
        """Closes the sessions of sockets that are not among these."""
        for path in [path for path in self._sessions if path not in paths]:
            await self._sessions.pop(path).close()

    async def close(self) -> None:
        await self.keep(())


@asynccontextmanager
async def asked(
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
