"""One sending of an inference request: how long it waited for a replica, what was sent there, what came back so far.

A request that is sent again has a new Attempt, so nothing of the last one can be forgotten in it.
"""

from __future__ import annotations

import asyncio

from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.upstream import UpstreamConnection
from appliance.gateway.routing.holds import Ticket
from appliance.gateway.routing.router import Choice
from appliance.gateway.state.placeable import Placeable


class Attempt:
    """row: the table row it is placed by, its model's or the canary's. path, body: of the engine's request. number: how
    many were sent and failed before it. deaths: engines that died of those (retry.py counts). lost: replicas that broke
    off under them; echoes: how many broke off at one that had done so before; unreached: how many reached none. alone:
    it goes where no other request stands trial, and stands trial itself. continues: it generates the rest of a stream.
    moved_from: the replica that it was taken from, empty if from none. refused_by: a canary
    version that refused it; refusal: its answer, which the client gets if no other version has room.

    ticket: while it waits, since held_since_s (0: it never waited) until hold_deadline_s; comment_s: when it is told
    so next. choice, connecting, conn: its replica, and the connection there. reconnects: a connection that was there
    before was lost without an answer, and a new one is tried. only: nothing else was there when it was sent;
    crowded: one other owner had most of what was.
    progress_s: when its engine was last heard of. relayed: the client got a byte of it. kept, kept_bytes: of a plain
    answer that does not go out yet. Times by the monotonic clock.
    """

    # Defaults stand in the class, as access.request.Request says.
    number: int = 0
    deaths: int = 0
    lost: tuple[str, ...] = ()
    echoes: int = 0
    unreached: int = 0
    alone: bool = False
    reconnects: bool = False
    continues: bool = False
    moved_from: str = ""
    refused_by: str = ""
    refusal: HttpError | None = None
    held_since_s: float = 0.0
    hold_deadline_s: float = 0.0
    comment_s: float = 0.0
    only: bool = False
    crowded: bool = False
    sent_s: float = 0.0
    progress_s: float = 0.0
    first_byte_s: float = 0.0
    relayed: bool = False
    kept_bytes: int = 0

    def __init__(self, row: str, path: bytes, body: bytes) -> None:
        self.row = row
        self.path = path
        self.body = body
        self.ticket: Ticket[Placeable] | None = None
        self.choice: Choice | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.conn: UpstreamConnection | None = None
        self.kept: list[bytes] | None = None

    def repeated(self) -> Attempt:
        """The same once more, nothing of it having reached the client. It waits no longer than this one might have."""
        again = Attempt(self.row, self.path, self.body)
        again.number, again.deaths, again.alone, again.continues = self.number, self.deaths, self.alone, self.continues
        again.lost, again.echoes, again.unreached = self.lost, self.echoes, self.unreached
        again.moved_from, again.refused_by, again.refusal = self.moved_from, self.refused_by, self.refusal
        again.held_since_s, again.hold_deadline_s = self.held_since_s, self.hold_deadline_s
        again.comment_s = self.comment_s
        return again

    def after_failure(self, deaths: int, *, alone: bool) -> Attempt:
        """`repeated`, and one more that failed. deaths: with that of its engine, if it died."""
        again = self.repeated()
        again.number, again.deaths, again.alone = self.number + 1, deaths, alone
        return again

    def continued(self, deaths: int, path: bytes, body: bytes) -> Attempt:
        """The rest of a stream that failed, asked for with another request. It may wait for the whole hold time."""
        rest = Attempt(self.row, path, body)
        rest.number, rest.deaths, rest.continues = self.number + 1, deaths, True
        rest.lost, rest.echoes, rest.unreached = self.lost, self.echoes, self.unreached
        rest.refused_by = self.refused_by
        return rest

    def broke_off(self, replica_id: str) -> bool:
        """Note it. True if this replica had not done so before."""
        if replica_id in self.lost:
            self.echoes += 1
            return False
        self.lost = (*self.lost, replica_id)
        return True
