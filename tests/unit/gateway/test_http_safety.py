"""Malformed, oversized and slow HTTP requests are refused with OpenAI's error object."""

import asyncio

import pytest

from .conftest import Box, Response, Start, chat, request_bytes
from .upstreams import answer_chat, gives, hangs

URL = "/v1/chat/completions"
AUTH = b"Authorization: Bearer sk-test-all\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + AUTH
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


async def _send(box: Box, data: bytes) -> tuple[Response, bytes]:
    """Send `data`; return the first response and all bytes after it, until the connection closes."""
    wire = await box.connect()
    await wire.send(data)
    response = await wire.response()
    return response, await wire.eof()


SMUGGLED = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
MALFORMED = {
    "length and chunked": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde" + SMUGGLED,
    "same length twice": POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd" + SMUGGLED,
    "length list": POST + b"Content-Length: 4, 4\r\n\r\nabcd" + SMUGGLED,
    "overflowing length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "folded header": POST + b"X-A: b\r\n c\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "bare CR": POST + b"X-A: b\rContent-Length: 0\r\n\r\n" + SMUGGLED,
    "space before colon": POST + b"Content-Length : 0\r\n\r\n" + SMUGGLED,
    "chunk size is not a number": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n" + SMUGGLED,
    "huge chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab",
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "length in a trailer": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n" + SMUGGLED,
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + SMUGGLED,
    "no host": b"GET /health HTTP/1.1\r\n\r\n" + SMUGGLED,
    "two keys": POST + AUTH + b"Content-Length: 0\r\n\r\n" + SMUGGLED,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space in URL": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_request_is_rejected_and_closes_connection(box: Box, name: str) -> None:
    response, rest = await _send(box, MALFORMED[name])
    assert 400 <= response.status <= 505
    assert response.error["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"
    assert rest == b"", "nothing after a malformed request may be answered"
    assert box.engines["e0"].requests == []
    assert (await box.ask("POST", URL, chat())).status == 200


# Java's HttpClient and `curl --http2` offer HTTP/2 with every request over plain HTTP.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_http2_upgrade_offer_is_ignored(box: Box, chunked: bool, bytewise: bool) -> None:
    body = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    if chunked:
        body = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    wire = await box.connect()
    data = POST + OFFER + body
    size = 1 if bytewise else len(data)
    for start in range(0, len(data), size):
        await wire.send(data[start : start + size])
        await asyncio.sleep(0)
    assert (await wire.response()).status == 200
    await wire.send(data + data + SMUGGLED)
    assert [(await wire.response()).status for _ in range(3)] == [200, 200, 200], "what follows is HTTP/1.1 too"
    assert all(request.body.startswith(BODY[:-1]) for request in box.engines["e0"].requests)


async def test_oversized_head_is_rejected(box: Box) -> None:
    for data in (
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 9000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000,
    ):
        wire = await box.connect()
        for start in range(0, len(data), 1000):
            await wire.send(data[start : start + 1000])
            await asyncio.sleep(0)
        response = await wire.response()
        assert (response.status, response.error["code"]) == (431, "bad_http_request")


async def test_oversized_body_with_or_without_length_is_rejected(start_box: Start) -> None:
    box = await start_box(limits={"inference_body_bytes": 1000, "control_body_bytes": 500}, engine=answer_chat)
    await box.control(hangs)
    for target, limit in ((URL, 1000), ("/v1/fine_tuning/jobs", 500)):
        head = f"POST {target} HTTP/1.1\r\nHost: a\r\n".encode() + AUTH
        response, rest = await _send(box, head + b"Content-Length: 1000000000000\r\n\r\nx")
        assert response.status == 413 and str(limit) in response.error["message"] and rest == b""
        wire = await box.connect()
        await wire.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"80\r\n" + b"x" * 128 + b"\r\n")
        for _ in range(20):
            wire.writer.write(b"80\r\n" + b"x" * 128 + b"\r\n")
        response = await wire.response()
        assert response.status == 413
    assert box.state.buffered_bytes == 0


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"1;x=", b"1\r\na\r\n0\r\nX: "])
async def test_endless_trailer_or_chunk_extension_is_rejected(box: Box, start: bytes) -> None:
    wire = await box.connect()
    await wire.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + start)
    for _ in range(20):
        await wire.send(b"x" * 10_000)
        await asyncio.sleep(0.001)  # the gateway reads each block by itself
    response = await wire.response()
    assert response.status == 400 and response.error["code"] == "bad_http_request"


async def test_garbage_after_request_closes_connection_after_answer(box: Box) -> None:
    wire = await box.connect()
    await wire.send(request_bytes("POST", URL, chat()) + b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n")
    assert (await wire.response()).status == 200
    assert await wire.eof() == b""


async def test_connections_over_limit_are_rejected(start_box: Start) -> None:
    box = await start_box(limits={"max_connections": 1}, engine=answer_chat)
    first = await box.connect()
    await box.until(lambda: len(box.state.connections) == 1)
    response = await (await box.connect()).response()
    assert response.status == 503 and response.error["code"] == "too_many_connections"
    await first.send(SMUGGLED)
    assert (await first.response()).status == 200
    first.close()
    await box.until(lambda: not box.state.connections)
    assert (await box.ask("GET", "/health")).status == 200


async def test_pipelined_requests_are_read_only_as_answered(box: Box) -> None:
    wire, count = await box.connect(), 40_000
    wire.writer.write(SMUGGLED * count)
    for _ in range(50):
        assert (await wire.response()).status == 200
    assert sum(len(connection.pipeline) for connection in box.state.connections) < count // 2


async def test_total_size_of_buffered_bodies_is_limited(start_box: Start) -> None:
    box = await start_box(limits={"buffered_body_bytes": 4000}, engine=answer_chat)
    slow = await box.connect()
    await slow.send(POST + b"Content-Length: 3500\r\n\r\n" + b" " * 3400)
    await box.until(lambda: box.state.buffered_bytes == 3400)
    response = await box.ask("POST", URL, chat(user="x" * 1000))
    assert response.status == 503 and response.error["code"] == "overloaded"
    assert int(response.headers["retry-after"]) <= 120
    slow.close()
    await box.until(lambda: box.state.buffered_bytes == 0)
    assert (await box.ask("POST", URL, chat(user="x" * 1000))).status == 200


async def test_slow_requests_time_out_and_idle_connections_close(start_box: Start) -> None:
    limits = {"head_timeout_s": 0.1, "body_grace_s": 0.1, "keepalive_s": 0.1}
    box = await start_box(limits=limits)
    head, body, silent, kept = [await box.connect() for _ in range(4)]
    await head.send(b"GET /health HTTP/1.1\r\nHost: a\r\nX")
    await body.send(POST + b"Content-Length: 1000\r\n\r\nx")
    await kept.send(SMUGGLED)
    assert (await kept.response()).status == 200
    for wire in (head, body):
        response = await wire.response()
        assert response.status == 408 and response.error["code"] == "request_timeout"
        assert await wire.eof() == b""
    assert await silent.eof() == b""
    assert await kept.eof() == b""
    await box.until(lambda: not box.state.connections)


async def test_pipelined_requests_are_answered_in_order_until_http_1_0(box: Box) -> None:
    wire = await box.connect()
    refused, second = request_bytes("POST", "/nothing", {"a": "x" * 1000}), request_bytes("POST", URL, chat(seed=7))
    await wire.send(refused + request_bytes("POST", URL, chat(stream=True)) + second[:-20])
    assert (await wire.response()).status == 404
    assert (await wire.response()).body.endswith(b"[DONE]\n\n")
    await wire.send(second[-20:] + SMUGGLED + request_bytes("HEAD", "/health") + SMUGGLED.replace(b"1.1", b"1.0"))
    answers = [await wire.response(), await wire.response()]
    _, headers, _ = await wire.head()
    answers.append(await wire.response())
    assert box.engines["e0"].requests[1].json["seed"] == 7
    assert [answer.status for answer in answers] == [200] * 3 and answers[1].body == answers[2].body
    assert int(headers["content-length"]) == len(answers[1].body)
    assert [answer.headers.get("connection") for answer in answers] == [None, None, "close"]
    assert await wire.eof() == b""


async def test_unread_answer_closes_connection(start_box: Start) -> None:
    limits = {"buffered_response_bytes": 64 << 20, "write_stall_s": 0.2}
    box = await start_box(engine=gives({"text": "x" * (32 << 20)}), limits=limits)
    wire = await box.send("POST", URL, chat())
    await box.until(lambda: box.state.metrics.events["client_disconnected"] == 1)
    await box.until(lambda: not box.state.connections)
    assert not box.state.exchanges and box.state.buffered_bytes == 0
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await wire.response()


async def test_rejected_upload_gets_answer_while_still_sending(box: Box) -> None:
    wire = await box.connect()
    head = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n"
    await wire.send(head)
    for _ in range(20):
        wire.writer.write(b"x" * 10_000)
    response = await wire.response()
    assert response.status == 401 and response.headers["connection"] == "close"
