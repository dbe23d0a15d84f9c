"""Errors of `/v1/messages` have Anthropic's shape, those of every other route OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Box, Response, Start, chat, request_bytes
from .upstreams import Reply, UpstreamRequest

URL = "/v1/messages"


def message(model: str = "m", **more: Any) -> dict[str, Any]:
    return chat(model, max_tokens=5, **more)


def told(response: Response, status: int, kind: str) -> str:
    """The message, if this is Anthropic's error object."""
    data = json.loads(response.body)
    assert (response.status, set(data), data["type"]) == (status, {"type", "error", "request_id"}, "error")
    assert set(data["error"]) == {"type", "message"} and data["error"]["type"] == kind
    assert data["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return data["error"]["message"]


async def test_what_the_gateway_refuses(start_box: Start) -> None:
    box = await start_box(holds={"hold_s": 0.02}, limits={"inference_body_bytes": 2000})
    await box.engine("e0")
    box.serve("m", "e0")
    box.serve("asleep")
    assert "API key" in told(await box.ask("POST", URL, message(), key=None), 401, "authentication_error")
    told(await box.ask("POST", URL, message(), key="sk-wrong"), 401, "authentication_error")
    told(await box.ask("POST", URL, message(), key="sk-test-tuning"), 403, "permission_error")
    assert "`nope`" in told(await box.ask("POST", URL, message("nope")), 404, "not_found_error")
    told(await box.ask("POST", URL, message(system="x" * 3000)), 413, "request_too_large")
    told(await box.ask("POST", URL, message(n=0)), 400, "invalid_request_error")
    told(await box.ask("GET", URL), 405, "invalid_request_error")
    asleep = await box.ask("POST", URL, message("asleep"))
    assert "not ready" in told(asleep, 529, "overloaded_error") and int(asleep.headers["retry-after"]) > 0
    box.limit(requests_per_minute=1)
    await box.ask("POST", URL, message())
    limited = await box.ask("POST", URL, message())
    told(limited, 429, "rate_limit_error")
    assert limited.headers["x-ratelimit-limit-requests"] == "1" and int(limited.headers["retry-after"]) > 0
    assert (await box.ask("POST", "/v1/chat/completions", chat("asleep"), key="sk-test-inference")).error["code"] == (
        "model_not_ready"
    )


@pytest.mark.parametrize(("status", "kind", "answered"), [(400, "invalid_request_error", 400), (500, "api_error", 500)])
async def test_what_the_engine_refuses(box: Box, status: int, kind: str, answered: int) -> None:
    async def refuses(request: UpstreamRequest, reply: Reply) -> None:
        await reply.json({"error": {"message": "no such thing", "type": "X", "param": None, "code": status}}, status)

    box.engines["e0"].script = refuses
    assert told(await box.ask("POST", URL, message()), answered, kind) == "no such thing"


async def test_a_stream_that_breaks_ends_with_anthropics_event(box: Box) -> None:
    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n')
        reply.die()

    box.engines["e0"].script = dies
    wire = await box.connect()
    await wire.send(request_bytes("POST", URL, message(stream=True)))
    response = await wire.response()
    *_, last = response.body.split(b"\n\n")[:-1]
    kind, data = last.split(b"\n")
    error = json.loads(data.removeprefix(b"data: "))
    assert kind == b"event: error" and error["type"] == "error" and error["error"]["type"] == "api_error"
    assert error["request_id"] == response.headers["x-request-id"]
