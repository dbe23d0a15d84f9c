"""Thousands of clients with little work per connection, so that tests measure the gateway."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time

from tests.front.box import MODEL, Front

CHAT = "/v1/chat/completions"


def allow_descriptors(wanted: int) -> None:
    """Raise the limit of open files to this. Raises RuntimeError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(f"{wanted} file descriptors are needed, but only {hard} allowed: raise ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def stream_request(key: str, events: int, pace_s: float) -> bytes:
    data = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "user": f"{events} {pace_s}"}
    body = json.dumps(data | {"stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class StreamClient(asyncio.Protocol):
    """Sends `data` and stores the answer. `first`: set at the first event. `over`: set at [DONE] or disconnection."""

    def __init__(self, data: bytes, *, reads: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.data, self.reads = data, reads
        self.received = bytearray()
        self.first: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if not self.reads:
            transport.pause_reading()  # type: ignore[attr-defined]
        self.transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first.done() and b'"content"' in self.received:
            self.first.set_result(None)
        if self.received.endswith(b"0\r\n\r\n") and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.first, self.over):
            if not future.done():
                future.set_result(None)

    @property
    def whole(self) -> bool:
        return self.received.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in self.received[-40:]

    @property
    def events(self) -> int:
        return self.received.count(b'"content"')


async def connect(front: Front, data: bytes, *, reads: bool = True) -> StreamClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: StreamClient(data, reads=reads), "127.0.0.1", front.port)
    return client


class Neighbours(threading.Thread):
    """Sends a plain request and a stream in turns. `failed`: incomplete answers. `slowest_s`: slowest pair of both."""

    def __init__(self, front: Front) -> None:
        super().__init__(name="neighbours")
        self.front, self.asked, self.slowest_s = front, 0, 0.0
        self.failed: list[str] = []
        self._stopping = threading.Event()

    def run(self) -> None:
        with self.front.http() as client:
            while not self._stopping.wait(0.02):
                data = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "user": "8 0.001"}
                began_s = time.monotonic()
                plain = client.post(CHAT, json=data)
                stream = client.post(CHAT, json=data | {"stream": True})
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                good = plain.status_code == stream.status_code == 200 and stream.text.count('"content"') == 8
                if not good or not stream.text.endswith("data: [DONE]\n\n"):
                    self.failed.append(plain.text + stream.text)
                self.asked += 2

    def __enter__(self) -> Neighbours:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()
