"""The gateway relays control routes to the controller, with an identity that only the gateway can set."""

import asyncio
import json

import pytest

from .conftest import Box, Start, chat, request_bytes
from .upstreams import Reply, UpstreamRequest, answer_chat, dies, gives

ANSWERS = gives({"object": "list", "data": []}, headers="x-kept: 1\r\nconnection: x-dropped\r\nx-dropped: 1\r\n")


async def test_relay_adds_identity_and_drops_forged_headers(box: Box) -> None:
    controller = await box.control(ANSWERS)
    response = await box.ask(
        "GET",
        "/v1/files?after=file-1&limit=5",
        key="sk-test-tuning",
        headers=(
            "X-Appliance-Key-Id: key_admin\r\nx-appliance-scopes: admin\r\nX_Appliance_Scopes: admin\r\n"
            "X-Appliance-Anything: x\r\nX-Forwarded-For: 1.2.3.4\r\n"
            "Idempotency-Key: abc\r\nx-stainless-retry-count: 1\r\n"
            "Connection: keep-alive, x-hop\r\nX-Hop: secret\r\nCookie: a=b\r\nX-Request-Id: mine\r\n"
        ),
    )
    assert response.status == 200 and response.headers["x-request-id"] == "mine"
    assert response.headers["x-kept"] == "1" and "x-dropped" not in response.headers
    assert response.headers["x-content-type-options"] == "nosniff"
    seen = controller.requests[0]
    assert seen.target == "/v1/files?after=file-1&limit=5"
    assert seen.headers["x-appliance-key-id"] == "key_tuning"
    assert seen.headers["x-appliance-scopes"] == "fine_tuning"
    assert seen.headers["x-request-id"] == "mine"
    assert seen.headers["idempotency-key"] == "abc" and seen.headers["x-stainless-retry-count"] == "1"
    assert not {n for n in seen.headers if "anything" in n or "_" in n}
    assert not {"authorization", "cookie", "x-forwarded-for", "x-hop"} & set(seen.headers)
    # With "Connection: close" the controller would cut off its answer if it has not read the whole body.
    assert seen.headers["connection"] == "keep-alive"


@pytest.mark.parametrize("chunked", [False, True])
async def test_relay_streams_uploads_unbuffered(box: Box, chunked: bool) -> None:
    block = bytes(range(256)) * 256
    arrived = asyncio.Event()
    received = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        head = await reader.readuntil(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head.lower()) is chunked
        body = b""
        while len(body) < len(block):
            body += await reader.read(65536)
        arrived.set()
        while (b"0\r\n\r\n" not in body[-5:]) if chunked else len(body) < 50 * len(block):
            body += await reader.read(1 << 20)
        received = len(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    server = await asyncio.start_unix_server(serve, box.gateway.config.controller_socket)
    wire = await box.connect()
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {50 * len(block)}"
    framed = b"%x\r\n%b\r\n" % (len(block), block) if chunked else block
    head = f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test-all\r\n{framing}\r\n\r\n"
    await wire.send(head.encode() + framed)
    await asyncio.wait_for(arrived.wait(), 60)  # the first block arrives before more blocks are sent
    for _ in range(49):
        await wire.send(framed)
    if chunked:
        await wire.send(b"0\r\n\r\n")
    assert (await wire.response()).body == b"{}"
    assert received >= 50 * len(block)
    assert box.state.buffered_bytes == 0
    server.close()


SHAPED = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": "conflict"}}


async def test_relay_errors_have_openai_shape(box: Box) -> None:
    controller = await box.control(ANSWERS)
    for status, body, message, code, given, headers in (
        (409, SHAPED, "m", "conflict", "", {"x-should-retry": "false", "retry-after": None}),
        (405, SHAPED, "m", "conflict", "allow: GET\r\nx-should-retry: false\r\n", {"allow": "GET"}),
        (404, {"detail": "Not Found"}, "Not Found", None, "", {"x-should-retry": None, "retry-after": None}),
        (500, b"Error", "The request failed with status 500.", None, "retry-after: 7200\r\n", {"retry-after": "120"}),
    ):
        controller.script = gives(body, status, given)
        response = await box.ask("GET", "/v1/fine_tuning/jobs/x")
        assert (response.status, response.error["message"], response.error["code"]) == (status, message, code)
        assert {name: response.headers.get(name) for name in headers} == headers


async def test_relay_waits_for_controller_restart_while_inference_runs(start_box: Start) -> None:
    box = await start_box(limits={"controller_wait_s": 2.0}, engine=answer_chat)
    assert (await box.ask("POST", "/v1/chat/completions", chat())).status == 200
    away = await box.ask("GET", "/v1/models")
    assert away.status == 503 and away.error["code"] == "controller_away" and int(away.headers["retry-after"]) <= 120
    wire = await box.send("POST", "/v1/fine_tuning/jobs", {"model": "m"})
    await box.until(lambda: bool(box.state.exchanges))
    await box.control(ANSWERS)
    assert (await wire.response()).status == 200
    assert json.loads(box.controller.requests[0].body) == {"model": "m"}


@pytest.mark.parametrize("ending", ["leaves", "bad chunk"])
async def test_relay_of_aborted_upload_never_completes_upstream(box: Box, ending: str) -> None:
    begun, outcome = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        try:
            outcome.set_result(await reader.read(-1))
        except ConnectionError:
            outcome.set_result(b"")

    server = await asyncio.start_unix_server(serve, box.gateway.config.controller_socket)
    wire = await box.connect()
    await wire.send(
        b"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test-all\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n"
    )
    await asyncio.wait_for(begun.wait(), 60)  # wait until there is an upstream connection to cut off
    if ending == "leaves":
        wire.close()
    else:
        await wire.send(b"zz\r\n")
        assert (await wire.response()).status == 400
    assert not (await asyncio.wait_for(outcome, 60)).endswith(b"0\r\n\r\n")
    server.close()


# A body that an attacker wants the controller to parse as the head of another request.
EVIL = (
    b"GET /admin/v1/keys HTTP/1.1\r\nhost: appliance\r\nx-appliance-key-id: key_admin\r\nx-appliance-scopes: admin\r\n"
    b"x-evil: 1\r\n\r\n"
)
AUTH = b"Host: a\r\nAuthorization: Bearer sk-test-all\r\n"


async def test_relay_applies_backpressure_to_uploads(box: Box) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_unix_server(serve, box.gateway.config.controller_socket)
    wire = await box.connect()
    await wire.send(b"POST /v1/files HTTP/1.1\r\n" + AUTH + b"Content-Length: 400000000\r\n\r\n")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            for _ in range(100):  # 100 MB: far more than all buffers between client and controller
                await wire.send(b"x" * 1_000_000)
    assert all(connection.flow.read_paused for connection in box.state.connections)
    server.close()


async def test_relay_rejects_get_with_body(box: Box) -> None:
    controller = await box.control(ANSWERS)
    for method, target in (("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("GET", "/metrics")):
        wire = await box.connect()
        await wire.send(request_bytes(method, target, EVIL) + request_bytes("GET", "/v1/files"))
        refused = await wire.response()
        assert refused.status == 400 and refused.error["code"] == "unexpected_body"
        assert (await wire.response()).status == 200, "the body was read to its end, and no further"
        chunked = await box.connect()
        head = f"{method} {target} HTTP/1.1\r\n".encode() + AUTH + b"Transfer-Encoding: chunked\r\n\r\n"
        await chunked.send(head + b"0\r\n\r\n" + EVIL)
        assert (await chunked.response()).error["code"] == "unexpected_body"
        assert await chunked.eof() == b""
    empty = await box.ask("DELETE", "/v1/files/file-1", b"")
    assert empty.status == 200, "an empty body is allowed"
    assert [request.method for request in controller.requests] == ["GET", "GET", "GET", "DELETE"]


async def test_relay_retries_only_requests_without_body(box: Box) -> None:
    async def every_second_time(request: UpstreamRequest, reply: Reply) -> None:
        await (ANSWERS if len(controller.requests) % 2 else dies)(request, reply)

    controller = await box.control(every_second_time)
    assert (await box.ask("GET", "/v1/files")).status == 200
    lost = await box.ask("POST", "/v1/fine_tuning/jobs", EVIL)
    assert lost.status == 502 and lost.error["code"] == "controller_away"
    for _ in range(2):
        assert (await box.ask("GET", "/v1/files")).status == 200
    assert [request.method for request in controller.requests] == ["GET", "POST", "GET", "GET", "GET"]
