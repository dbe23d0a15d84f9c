"""A fake engine or controller: a minimal HTTP/1.1 server on a Unix socket that answers by a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class UpstreamRequest:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """Writes the response to one request."""

    writer: asyncio.StreamWriter

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, data: Any, status: int = 200, headers: str = "") -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\r\nserver: uvicorn\r\ncontent-type: application/json\r\n{headers}"
        await self.raw(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def sse_head(self, headers: str = "") -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        await self.raw(f"{head}{headers}\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def die(self) -> None:
        self.writer.transport.abort()


Script = Callable[[UpstreamRequest, Reply], Awaitable[None]]


class DummyUpstream:
    """Answers requests by `script` and records them. alive: whether health probes get a good answer."""

    def __init__(self, path: str, script: Script) -> None:
        self.path = path
        self.script = script
        self.requests: list[UpstreamRequest] = []
        self.alive = True
        self.connections = 0
        self.lost = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> DummyUpstream:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                request = await _read_request(reader)
                if request.target == "/health":
                    await Reply(writer).json({}, 200 if self.alive else 503)
                    continue
                self.requests.append(request)
                script = asyncio.ensure_future(self.script(request, Reply(writer)))
                watch = asyncio.ensure_future(_closed(reader))
                await asyncio.wait({script, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not script.done():
                    self.lost.set()
                    script.cancel()
                    return
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
                script.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            self._writers.discard(writer)
            writer.close()


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the peer has disconnected. Requests are never pipelined here, so peeking loses nothing."""
    while not reader.at_eof() and reader.exception() is None and not reader._buffer:  # type: ignore[attr-defined]
        await asyncio.sleep(0.002)


async def _read_request(reader: asyncio.StreamReader) -> UpstreamRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        name = name.lower()
        assert name not in headers, f"{name} sent twice"
        headers[name] = value
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return UpstreamRequest(method, target, headers, body)


def chat_events(*texts: str, done: bool = True) -> list[bytes]:
    """Return the SSE events in which an engine streams a chat completion with these texts."""
    events = []
    for i, text in enumerate(texts):
        delta = {"role": "assistant", "content": text} if i == 0 else {"content": text}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop" if i == len(texts) - 1 and done else None}
        data = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        events.append(b"data: " + json.dumps(data).encode() + b"\n\n")
    return [*events, *([b"data: [DONE]\n\n"] if done else [])]


def chat_answer(text: str = "hello") -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def sends(*events: bytes, ends: bool = True, go_on: asyncio.Event | None = None) -> Script:
    """Script a stream of these events. ends: False keeps the stream open. go_on: awaited after the first event."""

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        for number, event in enumerate(events):
            if number == 1 and go_on is not None:
                await go_on.wait()
            await reply.chunk(event)
        if not ends:
            await asyncio.Event().wait()
        await reply.end()

    return script


def gives(data: Any, status: int = 200, headers: str = "") -> Script:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.json(data, status, headers)

    return script


async def dies(request: UpstreamRequest, reply: Reply) -> None:
    reply.die()


async def hangs(request: UpstreamRequest, reply: Reply) -> None:
    await asyncio.Event().wait()


async def answer_chat(request: UpstreamRequest, reply: Reply) -> None:
    """Answer a chat request with "hello", as a healthy engine does."""
    if request.json.get("stream"):
        await sends(*chat_events("hel", "lo"))(request, reply)
    else:
        await reply.json(chat_answer())
