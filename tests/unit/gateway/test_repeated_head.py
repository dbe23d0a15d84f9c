"""A head that was read before is not read again; everything that could tell the difference is."""

from __future__ import annotations

import hashlib
import random
import time

import pytest

from appliance.gateway.server import request_parser

from .conftest import KEY, Box, chat, request_bytes


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the HTTP parser was fed."""
    fed: list[bytes] = []

    class Parser(request_parser.httptools.HttpRequestParser):
        def feed_data(self, data):
            fed.append(bytes(data))
            return super().feed_data(data)

    monkeypatch.setattr(request_parser.httptools, "HttpRequestParser", Parser)
    return fed


def ask(text: str, **more) -> bytes:
    return request_bytes("POST", "/v1/chat/completions", {**chat(), "user": text}, **more)


async def test_the_same_head_with_other_bodies_is_parsed_once(box: Box, parsed: list[bytes]) -> None:
    wire = await box.connect()
    ids = set()
    for text in ("a", "bc", "x" * 2000, "d"):
        await wire.send(ask(text))
        response = await wire.response()
        assert response.status == 200
        ids.add(response.headers["x-request-id"])
    assert len(parsed) == 1 and len(ids) == 4
    assert [request.json["user"] for request in box.engines["e0"].requests] == ["a", "bc", "x" * 2000, "d"]
    assert box.state.metrics.requests["chat.completions", 200] == 4 and box.state.buffered_bytes == 0


async def test_a_revoked_key_is_refused_in_the_next_request(box: Box, parsed: list[bytes]) -> None:
    wire = await box.connect()
    for _ in range(2):
        await wire.send(ask("a"))
        assert (await wire.response()).status == 200
    box.keys = {digest: row for digest, row in box.keys.items() if row["id"] != "key_all"}
    box.apply()
    await wire.send(ask("a"))
    assert (await wire.response()).error["code"] == "invalid_api_key"


async def test_a_key_that_ends_is_refused_from_its_end_on_a_kept_connection(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new table says so while the controller is away: the key was served until it came back."""
    box.keys[hashlib.sha256(KEY.encode()).hexdigest()]["expires_s"] = time.time() + 60
    box.apply()
    wire = await box.connect()
    await wire.send(ask("a"))
    assert (await wire.response()).status == 200
    later_s = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later_s)
    await wire.send(ask("a"))
    response = await wire.response()
    assert response.status == 401 and "This API key expired at " in response.error["message"]


@pytest.mark.parametrize(
    "second",
    [
        ask("a", key="sk-test-inference"),
        ask("a", headers="X-Other: 1\r\n"),
        ask("a", headers="Connection: close\r\n"),
        request_bytes("POST", "/v1/completions", {"model": "m", "prompt": "p"}),
    ],
    ids=["another key", "another header", "close", "another route"],
)
async def test_another_head_is_parsed(box: Box, parsed: list[bytes], second: bytes) -> None:
    wire = await box.connect()
    for data in (ask("a"), second, ask("a")):
        await wire.send(data)
        assert (await wire.response()).status == 200
        if b"close" in data:
            assert await wire.eof() == b""
            break
    assert second in parsed


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (ask("a").replace(b"Content-Length: ", b"Content-Length: +"), 400),
        (ask("a").replace(b"Content-Length: ", b"Content-Length: 9999999999"), 413),
        (ask("a").replace(b"Host: box", b"Host: box\r\nTransfer-Encoding: chunked"), 400),
    ],
    ids=["sign", "huge", "two framings"],
)
async def test_a_bad_length_is_refused_as_ever(box: Box, broken: bytes, status: int) -> None:
    wire = await box.connect()
    await wire.send(ask("a"))
    assert (await wire.response()).status == 200
    await wire.send(broken)
    assert (await wire.response()).status == status


async def test_a_connection_of_differing_heads_stops_comparing(box: Box) -> None:
    wire = await box.connect()
    for i in range(8):
        await wire.send(ask("a", headers=f"X-Trace: {i}\r\n"))
        assert (await wire.response()).status == 200
    (connection,) = box.state.connections
    assert connection._parser._differing == request_parser._DIFFERING_HEADS


@pytest.mark.parametrize("seed", range(25))
async def test_any_cut_of_the_bytes_is_answered_alike(box: Box, seed: int) -> None:
    """Requests behind one another, cut anywhere: each gets one answer, in order."""
    draw = random.Random(seed)
    texts = ["x" * draw.choice([0, 1, 9, 10, 99, 1000]) + str(i) for i in range(6)]
    data = b"".join(ask(text) for text in texts)
    lengths = [len(ask(text)) for text in texts]
    # Some cuts fall on the ends of requests, where the short cut can be taken.
    ends = [sum(lengths[: i + 1]) for i in range(5)]
    cuts = sorted({*draw.sample(ends, 3), *draw.sample(range(1, len(data)), 2)})
    wire = await box.connect()
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        await wire.send(data[a:b])
        await box.until(lambda b=b: len(box.engines["e0"].requests) == sum(end <= b for end in [*ends, len(data)]))
    for _ in texts:
        assert (await wire.response()).status == 200
    assert [request.json["user"] for request in box.engines["e0"].requests] == texts
    assert KEY.encode() not in b"".join(request.body for request in box.engines["e0"].requests)
