"""Revoked means now: whatever of a request has arrived, and wherever it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from .conftest import Box, Wire, chat, digest, request_bytes
from .upstreams import Reply, UpstreamRequest, chat_events, hangs, sends

KEY, OTHER = "sk-test-inference", "sk-test-all"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def _head(target: str = "/v1/chat/completions", key: str = KEY, length: int = 1000) -> bytes:
    return (
        f"POST {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def _ended(wire: Wire) -> None:
    response = await wire.response()
    assert response.status == 401 and response.error["code"] == "invalid_api_key"
    assert response.headers["connection"] == "close"
    assert await wire.eof() == b""


@pytest.mark.parametrize("how", ["revoked", "rotated", "expired"])
async def test_a_body_that_is_still_arriving(box: Box, how: str) -> None:
    wire = await box.connect()
    await wire.send(_head() + BODY)
    await box.until(lambda: box.state.buffered_bytes == len(BODY))
    box.revoke(OTHER)
    assert box.state.buffered_bytes == len(BODY), "another's key is not this one"
    if how == "rotated":
        _rotate(box, KEY)
    elif how == "expired":
        box.limit(KEY, expires_s=1000.0)
    else:
        box.revoke(KEY)
    await _ended(wire)
    assert box.state.buffered_bytes == 0 and box.engines["e0"].requests == []
    assert box.state.metrics.events["revoked_in_flight"] == 1


async def test_what_was_pipelined_behind_a_stream_never_begins(box: Box) -> None:
    """One whole request, and one whose body is arriving, behind a stream of the same key."""
    box.engines["e0"].script = sends(chat_events("a", done=False)[0], ends=False)
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True), key=KEY)
    await box.until(lambda: len(box.engines["e0"].requests) == 1)
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(), key=KEY) + _head() + BODY)
    await box.until(lambda: any(connection.pipeline for connection in box.state.connections))
    box.revoke(KEY)
    assert (await wire.head())[0] == 200
    rest = await wire.eof()
    assert b"invalid_api_key" in rest and b"HTTP/1.1 200" not in rest
    assert len(box.engines["e0"].requests) == 1 and box.state.buffered_bytes == 0


async def test_a_request_that_is_held(box: Box) -> None:
    box.serve("m", e0="draining")
    wire = await box.send("POST", "/v1/chat/completions", chat(), key=KEY)
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    box.revoke(KEY)
    await _ended(wire)
    assert box.state.holds.models()["m"] == 0


async def test_a_control_request_whose_answer_is_awaited(box: Box) -> None:
    controller = await box.control(hangs)
    wire = await box.send("GET", "/v1/files", key="sk-test-tuning")
    await box.until(lambda: bool(controller.requests))
    box.revoke("sk-test-tuning")
    await _ended(wire)
    await asyncio.wait_for(controller.lost.wait(), 60)


def _rotate(box: Box, key: str) -> None:
    box.keys[digest("new")] = box.keys[digest(key)]
    box.revoke(key)


async def test_who_asks_for_a_new_secret_of_the_key_that_asks_gets_it(box: Box) -> None:
    """Otherwise nobody would have the new secret of the last administrator."""
    asked, rotated = asyncio.Event(), asyncio.Event()

    async def rotate(request: UpstreamRequest, reply: Reply) -> None:
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


async def test_a_key_is_refused_from_its_end_on(box: Box) -> None:
    """By the gateway's own clock, and also once the controller has taken it out of the table."""
    row = dict(box.keys[digest(KEY)])
    for changed, status in (
        (row | {"expires_s": time.time() + 60}, 200),
        (row | {"expires_s": time.time() - 1}, 401),
        ({"id": "key_gone", "expires_s": time.time() - 90 * 86_400}, 401),
    ):
        box.keys[digest(KEY)] = changed
        box.apply()
        response = await box.ask("POST", "/v1/chat/completions", chat(), key=KEY)
        assert response.status == status
        assert status == 200 or (response.error["code"] == "invalid_api_key" and "expired" in response.error["message"])
