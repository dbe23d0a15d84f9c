"""Revoked means now: whatever of a request has arrived, and wherever it is."""

from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from .conftest import Box, Start, Wire, chat, request_bytes
from .upstreams import Reply, UpstreamRequest, chat_events

KEY, OTHER = "sk-test-inference", "sk-test-all"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def _revoke(box: Box, key: str = KEY) -> None:
    del box.keys[hashlib.sha256(key.encode()).hexdigest()]
    box.apply()


def _head(target: str = "/v1/chat/completions", key: str = KEY, length: int = 1000) -> bytes:
    return (
        f"POST {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def _ended(wire: Wire) -> None:
    response = await wire.response()
    assert response.status == 401 and "revoked" in response.error["message"]
    assert response.headers["connection"] == "close"
    assert await wire.eof() == b""


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_that_is_still_arriving(box: Box, framing: str) -> None:
    wire = await box.connect()
    if framing == "length":
        await wire.send(_head() + BODY)
    else:
        head = _head().replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")
        await wire.send(head + b"%x\r\n%b\r\n" % (len(BODY), BODY))
    await box.until(lambda: box.state.buffered_bytes == len(BODY))
    _revoke(box, OTHER)
    assert box.state.buffered_bytes == len(BODY), "another's key is not this one"
    _revoke(box)
    await _ended(wire)
    assert box.state.buffered_bytes == 0 and box.engines["e0"].requests == []
    assert box.state.metrics.events["revoked_in_flight"] == 1


async def test_an_upload_that_is_passed_on(box: Box) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass
        gone.set()

    server = await asyncio.start_unix_server(serve, box.gateway.config.controller_socket)
    wire = await box.connect()
    await wire.send(_head("/v1/files", "sk-test-tuning") + b"x")
    await box.until(lambda: bool(box.state.exchanges))
    _revoke(box, "sk-test-tuning")
    await _ended(wire)
    await asyncio.wait_for(gone.wait(), 60)
    server.close()


async def test_what_was_pipelined_behind_a_stream_never_begins(box: Box) -> None:
    """One whole request, and one whose body is arriving, behind a stream of the same key."""
    going = asyncio.Event()

    async def stream(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(chat_events("a", done=False)[0])
        going.set()
        await asyncio.Event().wait()

    box.engines["e0"].script = stream
    wire = await box.connect()
    asked = request_bytes("POST", "/v1/chat/completions", chat(stream=True), key=KEY)
    await wire.send(asked)
    await asyncio.wait_for(going.wait(), 60)
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=KEY) + _head() + BODY)
    await box.until(lambda: any(conn.pipeline for conn in box.state.connections))
    _revoke(box)
    assert (await wire.head())[0] == 200
    rest = await wire.eof()
    assert b"was revoked while it ran" in rest and b"HTTP/1.1 200" not in rest
    assert len(box.engines["e0"].requests) == 1 and box.state.buffered_bytes == 0


async def test_a_request_that_is_held(box: Box) -> None:
    box.serve("m", e0="draining")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=KEY))
    await box.until(lambda: box.state.holds.held("m") == 1)
    _revoke(box)
    await _ended(wire)
    assert box.state.holds.held("m") == 0


async def test_a_control_request_whose_answer_is_awaited(box: Box) -> None:
    asked = asyncio.Event()

    async def never(request: UpstreamRequest, reply: Reply) -> None:
        asked.set()
        await asyncio.Event().wait()

    controller = await box.control(never)
    wire = await box.connect()
    await wire.send(request_bytes("GET", "/v1/files", key="sk-test-tuning"))
    await asyncio.wait_for(asked.wait(), 60)
    _revoke(box, "sk-test-tuning")
    await _ended(wire)
    await asyncio.wait_for(controller.lost.wait(), 60)


async def test_of_a_key_that_has_expired_it_is_said_so_and_when(box: Box) -> None:
    wire = await box.connect()
    await wire.send(_head() + BODY)
    await box.until(lambda: box.state.buffered_bytes == len(BODY))
    box.limit(KEY, expires_s=1000.0)
    _revoke(box)
    response = await wire.response()
    assert response.status == 401 and "expired at 1970-01-01 00:16 UTC while it ran" in response.error["message"]


def _rotate(box: Box, key: str) -> None:
    digest = hashlib.sha256(b"new").hexdigest()
    box.keys[digest] = box.keys.pop(hashlib.sha256(key.encode()).hexdigest())
    box.apply()


async def test_who_asks_for_a_new_secret_of_the_key_that_asks_gets_it(box: Box) -> None:
    """The answer was cut off as of a revoked key: nobody had the new secret, and with the box's last administrator's
    key nobody could ask for another one."""
    asked, rotated = asyncio.Event(), asyncio.Event()

    async def rotate(request: UpstreamRequest, reply: Reply) -> None:
        assert request.headers["x-appliance-secret"] == hashlib.sha256(OTHER.encode()).hexdigest()
        asked.set()
        await rotated.wait()
        await reply.json({"key": "new"})

    await box.control(rotate)
    wire, dripping = await box.connect(), await box.connect()
    await wire.send(request_bytes("POST", "/admin/v1/keys/all/rotate", key=OTHER))
    await dripping.send(_head("/admin/v1/keys/all/rotate", OTHER) + b"{")
    await asyncio.wait_for(asked.wait(), 60)
    await box.until(lambda: len(box.state.exchanges) == 2)
    _rotate(box, OTHER)
    await _ended(dripping)  # by whoever knows the old one it would learn the newest
    rotated.set()
    answer = await wire.response()
    assert answer.status == 200 and b'"new"' in answer.body


async def test_what_came_by_a_secret_that_was_replaced_ends_though_the_key_goes_on(box: Box) -> None:
    wire = await box.connect()
    await wire.send(_head() + BODY)
    await box.until(lambda: box.state.buffered_bytes == len(BODY))
    box.keys[hashlib.sha256(b"new").hexdigest()] = box.keys.pop(hashlib.sha256(KEY.encode()).hexdigest())
    box.apply()
    await _ended(wire)


async def test_a_body_that_drips_ends_however_steadily_it_comes(start_box: Start) -> None:
    """16 KiB in every window kept a request of 8 MiB open for four hours."""
    box = await start_box(limits={"body_bytes_per_s": 10_000, "body_grace_s": 0.1})
    wire = await box.connect()
    await wire.send(_head() + b"x")

    async def drip() -> None:
        while True:
            await wire.send(b"x")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    response = await wire.response()
    dripping.cancel()
    assert response.status == 408 and response.error["code"] == "request_timeout"


async def test_a_key_is_refused_from_its_end_on_in_words_and_told_from_one_that_never_was(box: Box) -> None:
    """By the gateway's own clock, and also once the controller has taken it out of the table."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    row = dict(box.keys[digest])
    box.keys[digest] = row | {"expires_s": time.time() + 60}
    box.apply()
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=KEY))
    assert (await wire.response()).status == 200
    for ended in (row | {"expires_s": 1_795_000_000.0 - 90 * 86_400}, {"id": "key_gone", "expires_s": 1_787_224_000.0}):
        box.keys[digest] = ended
        box.apply()
        wire = await box.connect()
        await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=KEY))
        response = await wire.response()
        assert response.status == 401 and "This API key expired at 2026-08-" in response.error["message"]
        assert response.error["code"] == "invalid_api_key"
