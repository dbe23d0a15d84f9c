"""Engines that die, hang or send bad answers; clients that disconnect or stop reading; errors in both API shapes."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import ResponseErrorEvent

from appliance.gateway.core.router import ReplicaLoad, Work

from .conftest import KEY, Box, Response, Start, chat
from .upstreams import Reply, Script, UpstreamRequest, answer_chat, chat_answer, chat_events, dies, gives, hangs, sends


async def dies_after_head(request: UpstreamRequest, reply: Reply) -> None:
    await reply.sse_head()
    reply.die()


@pytest.mark.parametrize("script", [dies, dies_after_head])
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_death_before_first_byte_is_retried(box: Box, script: Script, stream: bool) -> None:
    await box.engine("bad", script)
    box.serve("m", "bad", "e0")
    for seed in range(3):
        box.state.router.loads["bad"].paused_until_s = 0
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream, seed=seed))
        assert response.status == 200 and b"hel" in response.body
    assert box.state.router.loads["e0"].inflight == 0


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nmetadata: " + b"x" * 70_000 + b"\r\n\r\n", b"no head at all\r\n\r\n"]
)
async def test_malformed_answer_does_not_count_as_engine_death(box: Box, head: bytes) -> None:
    await box.engine("e1")
    box.serve("m", "e0", "e1")

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if b"odd" in request.body:
            await reply.raw(head[:66_000])
            await asyncio.sleep(0.02)
            await reply.raw(head[66_000:])
        else:
            await reply.json(chat_answer())

    box.engines["e0"].script = box.engines["e1"].script = script
    refused = await box.ask("POST", "/v1/chat/completions", chat(user="odd"))
    assert refused.status == 502 and refused.error["code"] == "engine_failed"
    asked = [engine.requests for engine in box.engines.values()]
    assert sum(map(len, asked)) <= 3
    assert all(load.paused_until_s == 0.0 and not load.inflight for load in box.state.router.loads.values())
    assert [(await box.ask("POST", "/v1/chat/completions", chat())).status for _ in range(8)] == [200] * 8
    assert box.state.metrics.events["held"] == 0


async def test_truncated_large_answer_breaks_the_transfer(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n")
        await reply.raw(b"x" * 1_000_000)
        reply.die()

    box.engines["e0"].script = script
    wire = await box.send("POST", "/v1/chat/completions", chat())
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await wire.response()
    assert box.state.router.loads["e0"].inflight == 0


LONG_CONTEXT = "This model's maximum context length is 8 (parameter=input_tokens, value=9)"


async def test_engine_errors_are_rewritten(box: Box) -> None:
    long = {"error": {"message": LONG_CONTEXT, "type": "X", "param": "input_tokens", "code": 400}}
    for status, body, param, code in (
        (400, {"error": {"message": "bad n", "type": "X", "param": "n", "code": 400}}, "n", None),
        (400, long, "messages", "context_length_exceeded"),
        (500, b"Internal Server Error", None, None),
    ):
        box.engines["e0"].script = gives(body, status)
        for stream in (False, True):
            response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream))
            assert (response.status, response.error["param"], response.error["code"]) == (status, param, code)
            assert "parameter=" not in response.error["message"]
    assert box.state.router.choose(["m"], Work(), 0.0) is not None, "one client's 500s must not block a replica"


async def test_error_500_of_dying_engine_is_retried(box: Box) -> None:
    dead = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    whole, stream = gives(dead, 500), sends(b"data: %b\n\n" % json.dumps(dead).encode(), b"data: [DONE]\n\n")

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        dying = stream if request.json["seed"] else whole
        await (dying if len(box.engines["e0"].requests) % 2 else answer_chat)(request, reply)

    box.engines["e0"].script, box.engines["e0"].alive = script, False
    for seed in (0, 1):
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=True, seed=seed))
        assert response.status == 200 and response.body == b"".join(chat_events("hel", "lo"))


async def test_adapter_missing_on_one_engine_is_retried_elsewhere(box: Box) -> None:
    missing = {"message": "The model `ft:mine@v1` does not exist.", "type": "NotFoundError", "code": 404}
    await box.engine("e1", gives({"error": missing}, 404))
    box.serve("m", "e0", "e1")
    box.models["ft:mine"] = {**box.models["m"], "adapter": "ft:mine@v1"}
    box.apply()
    for turn in range(8):  # routing by prefix sends some turns to the engine without the adapter
        body = chat("ft:mine", messages=[{"role": "user", "content": str(turn)}])
        assert (await box.ask("POST", "/v1/chat/completions", body)).status == 200
    assert 0 < len(box.engines["e1"].requests) <= 8


async def test_silent_engine_times_out(start_box: Start) -> None:
    box = await start_box(limits={"upstream_silence_s": 0.05}, engine=hangs)
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 504 and response.error["code"] == "engine_timeout"
    await asyncio.wait_for(box.engines["e0"].lost.wait(), 60)


@pytest.mark.parametrize("when", ["before the head", "mid-stream"])
async def test_client_disconnect_aborts_engine_request_at_once(box: Box, when: str) -> None:
    box.engines["e0"].script = sends(chat_events("a")[0], ends=False) if when == "mid-stream" else hangs
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True))
    await box.until(lambda: bool(box.engines["e0"].requests))
    if when == "mid-stream":
        await wire.head()
    wire.close()
    await asyncio.wait_for(box.engines["e0"].lost.wait(), 60)
    await box.until(lambda: not box.state.connections)
    assert box.state.router.loads["e0"] == ReplicaLoad()
    assert box.state.buffered_bytes == 0


async def test_revoked_key_closes_connection_with_unread_error(box: Box) -> None:
    box.engines["e0"].script = sends(b"data: %b\n\n" % (b"x" * (12 << 20)))  # 12 MB: more than the buffers hold
    await box.send("POST", "/v1/chat/completions", chat(stream=True, temperature=1))
    await box.until(lambda: any(exchange.broke_off for exchange in box.state.exchanges))
    (exchange,) = box.state.exchanges
    await asyncio.sleep(0.01)
    assert not exchange.task.done(), "its client does not read"
    box.revoke()
    await box.until(lambda: not box.state.connections)


POISON = "poison"


async def start_engines(box: Box, *names: str) -> None:
    """Start engines that die when they get a request with the user POISON and answer all other requests after 10 ms."""
    for name in names:

        async def script(request: UpstreamRequest, reply: Reply, name: str = name) -> None:
            await asyncio.sleep(0.01)
            if request.json.get("user") == POISON:
                asyncio.ensure_future(box.engines[name].stop())  # noqa: RUF006 - it cancels this script, too
                await asyncio.sleep(60)
            await asyncio.sleep(0.01)
            await answer_chat(request, reply)

        await box.engine(name, script)
    box.serve("m", *names)


async def ask(box: Box, user: str = "", **more: Any) -> Response:
    return await box.ask("POST", "/v1/chat/completions", chat(**({"user": user} if user else {}), **more))


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_killed_two_engines_is_not_retried(start_box: Start, stream: bool) -> None:
    box = await start_box()
    await start_engines(box, *(f"e{n}" for n in range(4)))
    answer = await ask(box, POISON, stream=stream)
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (502, "engines_died", "false")
    assert sum(engine._server is None for engine in box.engines.values()) == 2
    answers = await asyncio.gather(*(ask(box, f"u{n}", stream=stream) for n in range(12)))
    assert [answer.status for answer in answers] == [200] * 12
    assert box.state.metrics.events["engines_died"] == 1
    assert all(load.inflight == 0 for load in box.state.router.loads.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_node_loss_does_not_count_as_engine_deaths(start_box: Start, stream: bool) -> None:
    """All engines of a node vanish: one engine aborts during the request, and the others are unreachable."""
    box = await start_box()
    gone = [f"gone{n}" for n in range(6)]

    async def node_goes(request: UpstreamRequest, reply: Reply) -> None:
        for name in gone:
            await box.engines[name].stop()

    for name in gone:
        await box.engine(name, node_goes)
    box.serve("m", *gone)
    asked = asyncio.ensure_future(ask(box, stream=stream))
    await box.until(lambda: box.state.metrics.events["upstream_unreached"] >= 5)
    await start_engines(box, "home")
    box.serve("m", *gone, "home")
    answer = await asked
    assert answer.status == 200 and b"error" not in answer.body
    assert box.state.metrics.events["engines_died"] == 0


URL = "/v1/messages"


def message(model: str = "m", **more: Any) -> dict[str, Any]:
    return chat(model, max_tokens=5, **more)


def told(response: Response, status: int, kind: str) -> str:
    """Return the message of an error, after a check that the error has Anthropic's shape."""
    data = json.loads(response.body)
    assert (response.status, set(data), data["type"]) == (status, {"type", "error", "request_id"}, "error")
    assert set(data["error"]) == {"type", "message"} and data["error"]["type"] == kind
    assert data["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return data["error"]["message"]


async def test_messages_errors_have_anthropic_shape(start_box: Start) -> None:
    box = await start_box(holds={"hold_s": 1.02}, limits={"inference_body_bytes": 2000}, engine=answer_chat)
    box.serve("asleep")
    for body, key, status, kind in (
        (message(), None, 401, "authentication_error"),
        (message(), "sk-wrong", 401, "authentication_error"),
        (message(), "sk-test-tuning", 403, "permission_error"),
        (message("nope"), KEY, 404, "not_found_error"),
        (message(system="x" * 3000), KEY, 413, "request_too_large"),
        (message(n=0), KEY, 400, "invalid_request_error"),
    ):
        told(await box.ask("POST", URL, body, key=key), status, kind)
    told(await box.ask("GET", URL), 405, "invalid_request_error")
    asleep = await box.ask("POST", URL, message("asleep"))
    assert "not ready" in told(asleep, 529, "overloaded_error") and int(asleep.headers["retry-after"]) > 0
    for status, kind in ((400, "invalid_request_error"), (500, "api_error")):
        error = {"message": "no such thing", "type": "X", "param": None, "code": status}
        box.engines["e0"].script = gives({"error": error}, status)
        assert told(await box.ask("POST", URL, message()), status, kind) == "no such thing"
    box.limit(requests_per_minute=1)
    await box.ask("POST", URL, message())
    limited = await box.ask("POST", URL, message())
    told(limited, 429, "rate_limit_error")
    assert limited.headers["x-ratelimit-limit-requests"] == "1" and int(limited.headers["retry-after"]) > 0


DEATH = b'data: {"error":{"message":"EngineCore encountered an issue. See stack trace (above).","type":"X","code":500}}'
# Route -> (event of an engine, request). The requests sample, so no other engine can continue them.
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
async def test_stream_of_dead_engine_ends_with_one_error_event(box: Box, path: str, ending: str) -> None:
    event, body = STREAMS[path]

    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        for part in (event, event, *([DEATH] if ending == "error event" else [])):
            await reply.chunk(part + b"\n\n")
        if ending == "reset":
            reply.die()
        else:
            await reply.end()

    box.engines["e0"].script = dies
    wire = await box.send("POST", path, body)
    response = await wire.response()
    events = [one for one in response.body.split(b"\n\n") if one and not one.startswith(b":")]
    assert events[:-1] == [event, event] and b"EngineCore" not in response.body
    if ending != "error event":  # the engine itself ended its answer with an error
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
