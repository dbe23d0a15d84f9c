"""Sends copies of answered responses to the controller, which stores them.

The client's answer does not wait for a copy: it goes out in the same event loop turn. Copies go in batches, the next
one once the controller has acknowledged the last; while it is unreachable they wait here, up to
`response_copies_bytes`, those of one owner up to `owner_copies_bytes`. A response beyond that is not stored, and its
object says so. The controller stores a copy that arrives twice (it died before it acknowledged it) once. It may refuse
a batch because of one copy, or of several together: then each is sent alone, so that no other copy is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from appliance.gateway.http import wire
from appliance.gateway.http.upstream import UpstreamConnection, UpstreamListener
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

PATH = b"/internal/responses"
BATCH_BYTES = 1 << 20
RETRY_S = 0.5
SILENCE_S = 30.0
# A controller that answered a copy with an error would do so again.
MAX_REFUSALS = 3


class ResponseCopies(UpstreamListener):
    """The copies of one gateway, each with its owner. Invariant: `_bytes` is the size of all copies in `_waiting` and
    `_flying`, and `_owners` that of each owner's."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._flying: list[tuple[str, bytes]] = []
        self._bytes = 0
        self._owners: dict[str, int] = {}
        self._conn: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_s = 0.0
        self._next_s = 0.0
        self._refusals = 0
        self._alone = 0  # of the first in `_waiting`, so many are sent one by one

    def has_room(self, owner: str, nbytes: int) -> bool:
        limits = self._state.limits
        if self._owners.get(owner, 0) + nbytes > limits.owner_copies_bytes:
            return False
        return self._bytes + nbytes <= limits.response_copies_bytes

    def add(self, owner: str, copy: bytes) -> None:
        self._waiting.append((owner, copy))
        self._bytes += len(copy)
        self._owners[owner] = self._owners.get(owner, 0) + len(copy)
        if self._next_s <= time.monotonic():
            self._send()

    @property
    def delivering(self) -> bool:
        """Whether copies remain, and the controller was reachable at the last attempt."""
        return bool(self._bytes) and not self._next_s

    def sweep(self, now_s: float) -> None:
        if self._conn is not None and now_s - self._sent_s > SILENCE_S:
            self._conn.abort()
            self._failed("the controller did not answer")
        elif self._waiting and now_s >= self._next_s:
            self._send()

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._bytes:
            lost = len(self._waiting) + len(self._flying)
            log.warning("%d answered responses are not stored: the controller is away", lost)

    def _send(self) -> None:
        if self._flying or self._connecting is not None or not self._waiting:
            return
        pool, path = self._state.pool, self._state.config.controller_socket
        conn = pool.acquire(path)
        if conn is not None:
            self._connected(conn)
        else:
            self._connecting = pool.connect(path, self._connected)

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if isinstance(result, OSError):
            self._failed(str(result))
            return
        size, most = 0, 0 if self._alone else BATCH_BYTES
        while self._waiting and (not self._flying or size + len(self._waiting[0][1]) <= most):
            one = self._waiting.popleft()
            self._flying.append(one)
            size += len(one[1])
        body = b"[%b]" % b",".join([copy for _, copy in self._flying])
        self._conn, self._sent_s = result, time.monotonic()
        head = wire.own_head(PATH, self._state.new_request_id(), len(body), self._state.token)
        result.start(self, b"%b%b" % (head, body))

    # -- upstream.UpstreamListener

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        if not done:
            return
        self._conn = None
        if conn.status >= 500 and self._refusals < MAX_REFUSALS:
            self._refusals += 1
            self._failed(f"the controller answered {conn.status}")
            return
        if conn.status >= 300 and len(self._flying) > 1:
            # Eight copies of the densest requests allowed weighed more than the controller reads at once, and every
            # owner with a copy among them lost it.
            self._alone = len(self._flying)
            self._waiting.extendleft(reversed(self._flying))
            self._flying = []
            self._refusals, self._next_s = 0, 0.0
            self._send()
            return
        if conn.status >= 300:
            refused = len(self._flying)
            log.error("%d answered responses are not stored: the controller answered %d", refused, conn.status)
            self._state.metrics.events["responses_not_stored"] += refused
        for owner, copy in self._flying:
            self._bytes -= len(copy)
            left = self._owners[owner] - len(copy)
            if left:
                self._owners[owner] = left
            else:
                del self._owners[owner]
        self._flying = []
        self._alone = max(0, self._alone - 1)
        self._refusals, self._next_s = 0, 0.0
        self._send()

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._failed("the controller broke off")

    def _failed(self, why: str) -> None:
        if not self._next_s:
            log.warning("answered responses wait to be stored: %s", why)
        self._conn = None
        self._waiting.extendleft(reversed(self._flying))
        self._flying = []
        self._next_s = time.monotonic() + RETRY_S
