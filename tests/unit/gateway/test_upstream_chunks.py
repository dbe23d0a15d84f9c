"""appliance/gateway/http/upstream.py: an answer in chunks means the same wherever its bytes are cut."""

from __future__ import annotations

import asyncio
from itertools import combinations, pairwise

import pytest

from appliance.gateway.http.outbox import Outbox
from appliance.gateway.http.upstream import UpstreamConnection, UpstreamListener, UpstreamPool

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODIES = (b"data: 1\n\n", b"\r\n0\r\n\r\n", b"x" * 20)
CHUNKS = [b"%x\r\n%b\r\n" % (len(body), body) for body in BODIES]
LAST = b"0\r\n\r\n"


class Transport:
    aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


class Waiting(UpstreamListener):
    def __init__(self) -> None:
        self.body, self.done, self.lost = b"", False, False

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        assert not self.done
        self.body += body
        self.done = done

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self.lost = True

    def upstream_paused(self, paused: bool) -> None:
        pass


def read(pieces: list[bytes]) -> tuple[Waiting, UpstreamConnection]:
    owner = Waiting()

    async def turn() -> UpstreamConnection:
        conn = UpstreamConnection(UpstreamPool(Outbox()), "/engine")
        conn.connection_made(Transport())  # type: ignore[arg-type]
        conn.start(owner, b"request")
        for piece in pieces:
            conn.data_received(piece)
        return conn

    return owner, asyncio.run(turn())


def test_wherever_it_is_cut() -> None:
    text = b"".join(CHUNKS) + LAST
    for cuts in combinations(range(len(text) + 1), 2):
        owner, _ = read([HEAD, *(text[a:b] for a, b in pairwise((0, *cuts, len(text))) if a < b)])
        assert owner.body == b"".join(BODIES) and owner.done and not owner.lost, cuts


def test_chunks_that_share_reads() -> None:
    half = len(CHUNKS[2]) // 2
    owner, _ = read([HEAD, CHUNKS[0], CHUNKS[1] + CHUNKS[2][:half], CHUNKS[2][half:], CHUNKS[0], CHUNKS[1] + LAST])
    assert owner.body == b"".join((*BODIES, *BODIES[:2])) and owner.done


@pytest.mark.parametrize(
    "bad", [b"5\r\nabcdefg\r\n", b"-5\r\nabcde\r\n", b" 5\r\nabcde\r\n", b"5\r\nabcde\n\n", b"\r\n\r\n"]
)
def test_bad_chunks_break_the_answer_off(bad: bytes) -> None:
    owner, conn = read([HEAD, CHUNKS[0], bad])
    assert owner.lost and not owner.done and conn.transport.is_closing()  # type: ignore[union-attr]


def test_what_is_not_chunked_is_not_read_as_chunks() -> None:
    """A body whose text looks like chunks."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(CHUNKS[0])
    owner, _ = read([head, CHUNKS[0]])
    assert owner.body == CHUNKS[0] and owner.done
