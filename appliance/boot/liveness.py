"""Whether a process that lives also answers: one that hangs is killed, and its supervisor starts it anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from appliance.boot.supervised_process import Supervised

EVERY_S, PATIENCE_S = 5.0, 10.0
HUNG_S = 120.0
"""Longer than any pause that a process comes back from by itself: half a minute of SIGSTOP, a machine that swaps."""


class Pulse:
    """Asks `process` for `path` again and again. Any answer will do, a refusal too."""

    def __init__(
        self,
        process: Supervised,
        base_url: str,
        path: str,
        socket_path: str | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._process, self._base_url, self._path, self._socket_path = process, base_url, path, socket_path
        self._say, self._clock = say, clock
        self._asked: tuple[int | None, float] = (None, 0.0)

    async def watch(self) -> None:
        """For as long as it runs."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Ask once, and kill what has not answered since its start, or for `HUNG_S`."""
        pid, now_s = self._process.pid, self._clock()
        if pid is None or pid != self._asked[0] or await self._answers():
            self._asked = pid, now_s
        elif self._clock() - self._asked[1] >= HUNG_S and self._process.pid == pid:
            self._say(f"the {self._process.name} lives and has not answered for {HUNG_S:.0f} s: it is started anew")
            self._process.restart()

    async def _answers(self) -> bool:
        # Not verified, as where main waits for it: it is our own process we ask.
        transport = httpx.AsyncHTTPTransport(uds=self._socket_path, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url=self._base_url, timeout=PATIENCE_S) as client:
            try:
                await client.get(self._path)
            except httpx.HTTPError:
                return False
            return True
