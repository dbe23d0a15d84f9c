"""An engine on a Unix socket that answers from a can, as slowly as its request says."""

from __future__ import annotations

import asyncio

import orjson

from tests.unit.gateway.upstreams import chat_answer, chat_events


class CannedEngine(asyncio.Protocol):
    """One connection. The request's `user` says how it streams: "EVENTS PACE_S", else two events at once.

    `open` holds the connections there are, `answered` counts complete answers: both belong to the server's loop.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.transport: asyncio.Transport | None = None
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.counts.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.counts.open -= 1
        if self.timer is not None:
            self.timer.cancel()
            self.counts.streaming -= 1
            self.counts.aborted += 1
            self.timer = None

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = int(self.buffer[:end].lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(self.buffer) < end + 4 + length:
            return
        body = orjson.loads(self.buffer[end + 4 : end + 4 + length])
        self.buffer = b""
        assert self.transport is not None
        if not body.get("stream"):
            answer = orjson.dumps(chat_answer())
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
            self.counts.answered += 1
            return
        events, pace_s = (body.get("user") or "2 0").split()
        self.transport.write(_STREAM_HEAD)
        self.counts.streaming += 1
        self.timer = asyncio.get_running_loop().call_later(0, self.next, int(events), float(pace_s))

    def next(self, left: int, pace_s: float) -> None:
        assert self.transport is not None
        if not left:
            self.timer = None
            self.counts.streaming -= 1
            self.counts.answered += 1
            self.transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        if not self.paused:
            self.transport.write(_EVENT)
            left -= 1
        self.timer = asyncio.get_running_loop().call_later(pace_s, self.next, left, pace_s)


class Counts:
    """Of all connections of one engine. aborted: streams that the gateway broke off."""

    open = streaming = answered = aborted = 0


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT = _chunk(chat_events(" word", done=False)[0])
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
