"""Sends copies of answered responses and chat completions to the controller, which stores them.

The client's answer does not wait for its copy. Copies go in batches, the next once the controller has acknowledged the
last; while it is away they wait here, up to `response_copies_bytes`, those of one owner up to `owner_copies_bytes`. An
answer beyond that is not stored, and its object says so. The controller stores a copy that arrives twice once; where
it refuses a batch, each copy of it is sent alone, so that no other is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import Final

import aiohttp

from appliance.gateway.http import wire
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

PATH: Final = "/internal/responses"
BATCH_BYTES: Final = 1 << 20
RETRY_S: Final = 0.5
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)
# A controller that answered a copy with an error would do so again.
MAX_REFUSALS: Final = 3


class Copies:
    """delivering: copies are left, and the controller was there at the last attempt. Invariant: `_bytes` is the size
    of all copies here by owner."""

    def __init__(self, state: State) -> None:
        self.delivering = False
        self._state = state
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._bytes: Counter[str] = Counter()
        self._came = asyncio.Event()

    def has_room(self, owner: str, nbytes: int) -> bool:
        limits = self._state.limits
        if self._bytes[owner] + nbytes > limits.owner_copies_bytes:
            return False
        return self._bytes.total() + nbytes <= limits.response_copies_bytes

    def add(self, owner: str, copy: bytes) -> None:
        self._waiting.append((owner, copy))
        self._bytes[owner] += len(copy)
        self.delivering = True
        self._came.set()

    def left(self) -> int:
        return len(self._waiting)

    async def send_forever(self) -> None:
        """Until it is cancelled."""
        alone = refusals = 0
        while True:
            await self._came.wait()
            batch = self._batch(0 if alone else BATCH_BYTES)
            status = await self._sent(batch)
            if status is None or (status >= 500 and refusals < MAX_REFUSALS):
                refusals += status is not None
                if self.delivering:
                    log.warning("answered responses wait to be stored: the controller answered %s", status or "nothing")
                self.delivering = False
                await asyncio.sleep(RETRY_S)
                continue
            refusals = 0
            if status >= 300 and len(batch) > 1:
                alone = len(batch)
                continue
            if status >= 300:
                log.error("an answered response is not stored: the controller answered %d", status)
                self._state.metrics.events["responses_not_stored"] += 1
            alone = max(0, alone - 1)
            for _ in batch:
                owner, copy = self._waiting.popleft()
                self._bytes[owner] -= len(copy)
            self._bytes = +self._bytes
            self.delivering = bool(self._waiting)
            if not self._waiting:
                self._came.clear()

    def _batch(self, most: int) -> list[bytes]:
        batch: list[bytes] = []
        for _, copy in self._waiting:
            if batch and sum(map(len, batch)) + len(copy) > most:
                break
            batch.append(copy)
        return batch

    async def _sent(self, batch: list[bytes]) -> int | None:
        """The controller's status; None if it did not answer."""
        state = self._state
        headers = {"content-type": "application/json", **wire.own_identity(state.new_request_id(), state.token)}
        session = state.engines.of(state.config.controller_socket, lasting=False)
        try:
            async with session.post(
                f"http://appliance{PATH}", data=b"[%b]" % b",".join(batch), headers=headers, timeout=_TIMEOUT
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
