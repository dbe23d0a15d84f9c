"""Sends copies of answered responses and chat completions to the controller, which stores them.

The client's answer does not wait for its copy. Copies go in batches, the next once the controller has acknowledged the
last; while it is away they wait here, up to `response_copies_bytes`. An answer that begins after that is not stored,
and its object says so. The controller stores a copy that arrives twice once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Final

import aiohttp

from appliance.gateway.http import wire
from appliance.gateway.server.state import State

log = logging.getLogger("appliance.gateway")

PATH: Final = "/internal/responses"
BATCH_BYTES: Final = 1 << 20
RETRY_S: Final = 0.5
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)
# A controller that answered a batch with an error would do so again.
MAX_REFUSALS: Final = 3


class Copies:
    """delivering: copies are left, and the controller was there at the last attempt."""

    def __init__(self, state: State) -> None:
        self.delivering = False
        self._state = state
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._came = asyncio.Event()

    def has_room(self) -> bool:
        return self._bytes < self._state.limits.response_copies_bytes

    def add(self, copy: bytes) -> None:
        self._waiting.append(copy)
        self._bytes += len(copy)
        self.delivering = True
        self._came.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def send_forever(self) -> None:
        """Until it is cancelled."""
        refusals = 0
        while True:
            await self._came.wait()
            sizes = itertools.accumulate(map(len, self._waiting))
            batch = list(itertools.islice(self._waiting, max(1, sum(size <= BATCH_BYTES for size in sizes))))
            status = await self._send(batch)
            refusals = refusals + 1 if status >= 300 else 0
            if not status or (status >= 500 and refusals <= MAX_REFUSALS):
                self.delivering = False
                await asyncio.sleep(RETRY_S)
                continue
            if refusals:
                log.error("%d answered responses are not stored: the controller answered %d", len(batch), status)
                self._state.metrics.events["responses_not_stored"] += len(batch)
                refusals = 0
            for _ in batch:
                self._bytes -= len(self._waiting.popleft())
            self.delivering = bool(self._waiting)
            if not self._waiting:
                self._came.clear()

    async def _send(self, batch: list[bytes]) -> int:
        """The controller's status; 0 if it did not answer."""
        state = self._state
        headers = {"content-type": "application/json", **wire.own_identity(state.new_request_id(), state.token)}
        session = state.engines.of(state.config.controller_socket, lasting=False)
        try:
            async with session.post(
                f"http://appliance{PATH}", data=b"[%b]" % b",".join(batch), headers=headers, timeout=_TIMEOUT
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0
