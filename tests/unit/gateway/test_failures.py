"""Engines that die, hang, err or lie; clients that leave or never read."""

from __future__ import annotations

import asyncio
import json

import pytest

from appliance.gateway.core.router import ReplicaLoad, Work

from .conftest import Box, Start, chat, request_bytes
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_answer, chat_events


def _events(body: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


async def test_death_before_the_first_byte_is_invisible(start_box: Start) -> None:
    box = await start_box()

    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        reply.die()

    async def dies_after_head(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        reply.die()

    for script in (dies, dies_after_head):
        await box.engine("bad", script)
        await box.engine("good")
        box.serve("m", "bad", "good")
        for stream in (False, True):
            for _ in range(3):
                box.state.router.loads["bad"].paused_until_s = 0
                response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream, seed=_))
                assert response.status == 200
                assert b"hel" in response.body
        for engine in box.engines.values():
            await engine.stop()
        for name in list(box.engines):
            (box.folder / f"{name}.sock").unlink(missing_ok=True)
        assert box.state.router.loads["good"].inflight == 0


async def test_partial_plain_answer_is_retried_because_nothing_was_sent(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if len(box.engines["e0"].requests) == 1:
            await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
            reply.die()
        else:
            await reply.json(chat_answer())

    box.engines["e0"].script = script
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 200
    assert json.loads(response.body) == chat_answer()
    assert box.state.metrics.events["retried"] == 1


@pytest.mark.parametrize("ending", ["reset", "clean end of HTTP"])
async def test_death_mid_stream_is_said_not_hidden(box: Box, ending: str) -> None:
    first = chat_events("hel", "lo")[0]

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(first)
        await asyncio.sleep(0.01)
        if ending == "reset":
            reply.die()
        else:
            await reply.end()

    box.engines["e0"].script = script
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    response = await wire.response()
    assert response.body.startswith(first)
    last = _events(response.body)[-1]
    assert set(last["error"]) == {"message", "type", "param", "code"} and last["error"]["code"] == "engine_failed"
    assert b"[DONE]" not in response.body
    assert await wire.eof() == b""


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nmetadata: " + b"x" * 70_000 + b"\r\n\r\n", b"no head at all\r\n\r\n"]
)
async def test_an_answer_that_cannot_be_read_is_no_death_of_its_engine(box: Box, head: bytes) -> None:
    """Told of 2,000 inputs in a header, an engine was taken for dead, and its fellow; all others waited for both."""
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


async def test_large_plain_answer_cut_short_breaks_the_transfer(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n")
        await reply.raw(b"x" * 1_000_000)
        reply.die()

    box.engines["e0"].script = script
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await wire.response()
    assert box.state.router.loads["e0"].inflight == 0


async def test_engine_errors_are_rewritten(box: Box) -> None:
    cases = [
        (400, {"error": {"message": "bad n", "type": "BadRequestError", "param": "n", "code": 400}}, 400, "n", None),
        (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 8 (parameter=input_tokens, value=9)",
                    "type": "BadRequestError",
                    "param": "input_tokens",
                    "code": 400,
                }
            },
            400,
            "messages",
            "context_length_exceeded",
        ),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "not an int"}]}, 422, None, None),
        (
            500,
            {"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}},
            500,
            None,
            None,
        ),
        (500, b"Internal Server Error", 500, None, None),
    ]
    for status, body, expected, param, code in cases:

        async def script(request: UpstreamRequest, reply: Reply, status: int = status, body: object = body) -> None:
            await reply.json(body, status)

        box.engines["e0"].script = script
        for stream in (False, True):
            response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream))
            assert (response.status, response.error["param"], response.error["code"]) == (expected, param, code)
            assert response.headers["x-request-id"].startswith("req_")
            assert "parameter=" not in response.error["message"]
    assert box.state.router.choose(["m"], Work(), 0.0) is not None, "one client's 500s must not block a replica"


async def test_dying_engine_that_still_answers_500_is_retried(box: Box) -> None:
    dead = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if len(box.engines["e0"].requests) % 2 == 0:
            await answer_chat(request, reply)
        elif request.json.get("seed"):
            await reply.json(dead, 500)
        else:
            await reply.sse_head()
            await reply.chunk(b"data: " + json.dumps(dead).encode() + b"\n\n")
            await reply.chunk(b"data: [DONE]\n\n")
            await reply.end()

    box.engines["e0"].script = script
    box.engines["e0"].alive = False
    for seed in (0, 1):
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=True, seed=seed))
        assert response.status == 200 and response.body == b"".join(chat_events("hel", "lo"))


async def test_engine_that_was_given_another_model_is_no_404(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if len(box.engines["e0"].requests) == 1:
            message = "The model `m` does not exist."
            await reply.json({"error": {"message": message, "type": "NotFoundError", "code": 404}}, 404)
        else:
            await answer_chat(request, reply)

    box.engines["e0"].script = script
    assert (await box.ask("POST", "/v1/chat/completions", chat())).status == 200


async def test_adapter_missing_on_one_engine_is_asked_of_the_other(box: Box) -> None:
    async def lacks(request: UpstreamRequest, reply: Reply) -> None:
        message = "The model `ft:mine@v1` does not exist."
        await reply.json({"error": {"message": message, "type": "NotFoundError", "code": 404}}, 404)

    await box.engine("e1", lacks)
    box.serve("m", "e0", "e1")
    box.models["ft:mine"] = {**box.models["m"], "adapter": "ft:mine@v1"}
    box.apply()
    for turn in range(8):  # by their beginnings some prefer the engine that lacks it
        answer = await box.ask(
            "POST", "/v1/chat/completions", chat("ft:mine", messages=[{"role": "user", "content": str(turn)}])
        )
        assert answer.status == 200
    assert 0 < len(box.engines["e1"].requests) <= 8


async def test_error_events_inside_a_stream_are_rewritten(box: Box) -> None:
    first = chat_events("hel", "lo")[0]
    error = {"error": {"message": "KV cache lost", "type": "InternalServerError", "param": None, "code": 500}}

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(first)
        await asyncio.sleep(0.01)
        await reply.chunk(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        await reply.end()

    box.engines["e0"].script = script
    response = await box.ask("POST", "/v1/chat/completions", chat(stream=True))
    assert _events(response.body)[-1]["error"]["code"] == "engine_failed"


async def test_silent_engine_times_out(start_box: Start) -> None:
    box = await start_box(limits={"upstream_silence_s": 0.05})

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await asyncio.sleep(60)

    await box.engine("e0", script)
    box.serve("m", "e0")
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 504 and response.error["code"] == "engine_timeout"
    await asyncio.wait_for(box.engines["e0"].lost.wait(), 60)


@pytest.mark.parametrize("when", ["before the head", "mid-stream"])
async def test_leaving_client_aborts_the_engine_at_once(box: Box, when: str) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if when == "mid-stream":
            await reply.sse_head()
            await reply.chunk(chat_events("a")[0])
        await asyncio.sleep(60)

    box.engines["e0"].script = script
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await box.until(lambda: bool(box.engines["e0"].requests))
    if when == "mid-stream":
        await wire.head()
    wire.close()
    await asyncio.wait_for(box.engines["e0"].lost.wait(), 60)
    await box.until(lambda: not box.state.connections)
    assert box.state.router.loads["e0"] == ReplicaLoad()
    assert box.state.buffered_bytes == 0


async def test_client_that_never_reads_is_bounded_and_dropped_while_neighbours_run(start_box: Start) -> None:
    box = await start_box(limits={"write_stall_s": 0.5})
    sent = 0

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        nonlocal sent
        if not request.json.get("stream"):
            await reply.json(chat_answer())
            return
        await reply.sse_head()
        for _ in range(4000):
            await reply.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    await box.engine("e0", script)
    box.serve("m", "e0")
    wire = await box.connect()
    wire.reader._limit = 1  # the stream reader stops reading its socket at once
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await box.until(lambda: any(conn.flow.write_paused for conn in box.state.connections))
    conn = next(conn for conn in box.state.connections if conn.flow.write_paused)
    for _ in range(5):
        assert (await box.ask("POST", "/v1/chat/completions", chat())).status == 200
    # On a machine that is slow enough it has been dropped by now.
    assert conn.transport.is_closing() or conn.transport.get_write_buffer_size() < 1 << 20
    await asyncio.wait_for(box.engines["e0"].lost.wait(), 60)
    assert sent < 40 << 20
    assert box.state.metrics.events["client_stalled"] == 1
