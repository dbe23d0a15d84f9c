"""Good requests: bytes go through unchanged, heads are ours."""

from __future__ import annotations

import asyncio

from .conftest import Box, chat, request_bytes, salted
from .upstreams import Reply, UpstreamRequest, chat_events, gives, sends


async def test_plain_answer_is_byte_exact_and_head_is_ours(box: Box) -> None:
    body = b'{"id": "x",   "odd spacing":  1}'
    box.engines["e0"].script = gives(body, headers="x-engine-secret: 1\r\nset-cookie: a=b\r\n")
    sent = b'{"model":"m","messages":[{"role":"user","content":"\xc3\xbc"}],  "seed":1}'
    response = await box.ask("POST", "/v1/chat/completions", sent, headers="X-Appliance-Scopes: admin\r\nCookie: a\r\n")
    assert response.status == 200
    assert response.body == body
    assert response.headers["x-appliance-model-version"] == "v1"
    assert response.headers["x-request-id"].startswith("req_")
    assert not {"x-engine-secret", "set-cookie", "server"} & set(response.headers)
    seen = box.engines["e0"].requests[0]
    assert seen.body == salted(sent)
    ours = {"x-request-id", "x-vllm-priority"}
    assert set(seen.headers) == {"host", "content-type", "content-length"} | ours


async def test_first_token_is_not_kept_back(box: Box) -> None:
    go_on = asyncio.Event()
    first, *rest = chat_events("a", "b")

    box.engines["e0"].script = sends(first, *rest, go_on=go_on)
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True))
    status, headers, _ = await wire.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert await wire.chunk() == first
    go_on.set()
    assert await wire.response_body() == b"".join(rest)


async def test_the_version_named_is_the_engines_own(box: Box) -> None:
    named = "x-appliance-model-version: v2\r\n"

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if not request.json.get("stream"):
            await reply.json({"ok": 1}, headers=named)
            return
        await reply.sse_head(named)
        await reply.chunk(b'data: {"a": 1}\n\ndata: [DONE]\n\n')
        await reply.end()

    box.engines["e0"].script = script
    for stream in (False, True):
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream))
        assert response.headers["x-appliance-model-version"] == "v2"
    assert "v2" in {version for _, version, _ in box.state.metrics.series}
    box.serve("mine", "e0")
    box.models["mine"]["adapter"] = "a7"
    box.apply()
    response = await box.ask("POST", "/v1/chat/completions", chat("mine"))
    assert response.headers["x-appliance-model-version"] == "v1"


async def test_expect_continue(box: Box) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    whole = request_bytes("POST", "/v1/chat/completions", body, headers="Expect: 100-continue\r\n")
    wire = await box.connect()
    await wire.send(whole[: -len(body)])
    assert (await wire.head())[0] == 100
    await wire.send(body)
    assert (await wire.response()).status == 200
    refused = await box.send("POST", "/v1/models", key=None, headers="Expect: 100-continue\r\nContent-Length: 9\r\n")
    assert (await refused.response()).headers["connection"] == "close"
