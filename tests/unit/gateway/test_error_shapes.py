"""Errors of `/v1/messages` have Anthropic's shape, those of every other route OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseErrorEvent

from .conftest import Box, Response, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat, gives

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
    box = await start_box(holds={"hold_s": 0.02}, limits={"inference_body_bytes": 2000}, engine=answer_chat)
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
    error = {"message": "no such thing", "type": "X", "param": None, "code": status}
    box.engines["e0"].script = gives({"error": error}, status)
    assert told(await box.ask("POST", URL, message()), answered, kind) == "no such thing"


DEATH = b'data: {"error":{"message":"EngineCore encountered an issue. See stack trace (above).","type":"X","code":500}}'
# Two events of an engine, and the request that asks for them (not greedy: no other engine can go on).
STREAMS = {
    "/v1/chat/completions": (b'data: {"choices":[{"delta":{"content":"a"}}]}', chat(stream=True, temperature=1)),
    "/v1/responses": (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}',
        {"model": "m", "input": "a", "stream": True, "store": False},
    ),
    URL: (b'event: content_block_delta\ndata: {"type":"content_block_delta"}', message(stream=True)),
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("ending", ["error event", "reset", "clean end of HTTP"])
async def test_a_stream_whose_engine_dies_ends_with_one_error_event_of_its_api(
    box: Box, path: str, ending: str
) -> None:
    event, body = STREAMS[path]

    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(event + b"\n\n")
        await reply.chunk(event + b"\n\n")
        if ending == "reset":
            reply.die()
            return
        if ending == "error event":
            await reply.chunk(DEATH + b"\n\n")
        await reply.end()

    box.engines["e0"].script = dies
    wire = await box.send("POST", path, body)
    response = await wire.response()
    events = [one for one in response.body.split(b"\n\n") if one and not one.startswith(b":")]
    assert events[:-1] == [event, event] and b"EngineCore" not in response.body
    if ending != "error event":  # the engine's answer had an end
        assert await wire.eof() == b""
    *kind, data = events[-1].split(b"\n")
    error = json.loads(data.removeprefix(b"data: "))
    if path == "/v1/chat/completions":
        assert kind == [] and set(error) == {"error"} and error["error"]["code"] == "engine_failed"
        return
    assert kind == [b"event: error"] and error["type"] == "error"
    if path == URL:
        assert set(error) == {"type", "error", "request_id"} and error["error"]["type"] == "api_error"
    else:
        told = ResponseErrorEvent.model_validate(error)
        assert (told.sequence_number, told.code, told.param) == (2, "engine_failed", None) and told.message
