"""Checks that a living process answers: one that hangs is killed, and its supervisor starts it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from appliance.boot.supervised_process import Supervised

EVERY_S, PATIENCE_S = 5.0, 10.0
HUNG_S = 120.0
"""Longer than any pause that a process recovers from by itself, such as half a minute of SIGSTOP or of swapping."""
LONGEST_HUNG_S = 8 * HUNG_S
"""What is started again in place of one that did not answer gets twice its time, up to this: on a machine with no
processor time to give, a start may take minutes, and one that is always cut short never ends."""


class Pulse:
    """Asks `process` for `path` again and again. Any answer will do, even a refusal."""

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
        self._hung_s = HUNG_S

    async def watch(self) -> None:
        """Looks again and again until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Asks once. Kills a process that has not answered for `HUNG_S`, or not since its start that long ago; twice as
        long after each that was killed, until one answers."""
        pid, now_s = self._process.pid, self._clock()
        if pid is None or pid != self._asked[0]:
            self._asked = pid, now_s
        elif await self._answers():
            self._asked, self._hung_s = (pid, now_s), HUNG_S
        elif self._clock() - self._asked[1] >= self._hung_s and self._process.pid == pid:
            self._say(f"the {self._process.name} lives and has not answered for {self._hung_s:.0f} s: it is restarted")
            self._hung_s = min(2 * self._hung_s, LONGEST_HUNG_S)
            self._process.restart()

    async def _answers(self) -> bool:
        # No verification: we ask our own process, whose certificate names the box and not loopback.
        transport = httpx.AsyncHTTPTransport(uds=self._socket_path, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url=self._base_url, timeout=PATIENCE_S) as client:
            try:
                await client.get(self._path)
            except httpx.HTTPError:
                return False
            return True
