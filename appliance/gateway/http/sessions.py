"""Connections to engines and the controller: an aiohttp session for each Unix socket."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import aiohttp

_KEEPALIVE_S: Final = 10.0
"""Engines keep idle connections for an hour, so none is used that its engine is just closing. After a crowd of requests
the gateway keeps as many descriptors for this long."""
_READ_BYTES: Final = 256 * 1024


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
        gone = [self._sessions.pop(path) for path in list(self._sessions) if path not in paths]
        for session in gone:
            await session.close()

    async def close(self) -> None:
        await self.keep(())


async def read_up_to(content: aiohttp.StreamReader, most: int) -> bytes:
    """A body, or its first `most` bytes: a single `read` returns what has come."""
    body = b""
    while len(body) < most and (more := await content.read(most - len(body))):
        body += more
    return body
