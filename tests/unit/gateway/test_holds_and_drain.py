"""Requests wait for replicas; drained replicas get nothing new; keys and models change under way."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from appliance.gateway.main import load_report

from .conftest import Box, Start, chat, digest, request_bytes, waiting
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_events, gives, sends


async def test_held_until_a_replica_opens_in_order(start_box: Start) -> None:
    box = await start_box()
    order: list[int] = []

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        order.append(request.json["seed"])
        await answer_chat(request, reply)

    await box.engine("e0", script)
    box.serve("m")
    assert load_report(box.state)["models"] == {}, "nothing of models that nobody has asked"
    wires = []
    box.reports.clear()
    for i in range(5):
        wire = await box.send("POST", "/v1/chat/completions", chat(seed=i, stream=i % 2 == 0))
        await box.until(lambda i=i: box.state.holds.models()["m"] == i + 1)
        wires.append(wire)
    assert load_report(box.state)["models"]["m"]["held"] == 5
    assert load_report(box.state)["models"]["m"]["inflight"] == 0
    assert [one["models"]["m"]["held"] for one in box.reports] == [1], "a sleeping model wakes on the first, at once"
    box.serve("m", "e0")
    responses = [await wire.response() for wire in wires]
    assert [response.status for response in responses] == [200] * 5
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert responses[0].body == b"".join(chat_events("hel", "lo"))
    assert waiting(box) == 0


@pytest.mark.parametrize("refused", [False, True])
async def test_held_stream_gets_comments_then_its_answer_or_an_error_event(start_box: Start, refused: bool) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0, "sse_interval_s": 0.01})

    refuses = gives({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)
    await box.engine("e0", refuses if refused else answer_chat)
    box.serve("m")
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True))
    status, headers, _ = await wire.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert await wire.chunk() == b": held\n\n"
    assert await wire.chunk() == b": held\n\n"
    box.serve("m", "e0")
    body = await wire.response_body()
    events = [part for part in body.split(b"\n\n") if not part.startswith(b":")]
    if refused:
        assert json.loads(events[0].removeprefix(b"data: "))["error"]["message"] == "too long"
    else:
        assert b"\n\n".join(events) == b"".join(chat_events("hel", "lo"))
        assert b": version v1\n\n" in body


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [("generate", "/v1/chat/completions", chat(stream=True)), ("embed", "/v1/embeddings", {"input": "x"})],
)
async def test_hold_plain_answer_never_joins_a_stream(
    start_box: Start, task: str, path: str, body: dict[str, object]
) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0, "sse_interval_s": 0.01})
    await box.engine("e0", gives({"object": "list"}))
    box.serve("m", task=task)
    wire = await box.send("POST", path, body | {"model": "m", "stream": True})
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    await asyncio.sleep(0.05)
    box.serve("m", "e0", task=task)
    answer = await wire.response()
    plain = task == "embed"
    assert answer.status == 200 and (b"engine_failed" not in answer.body) is plain
    assert answer.headers["content-type"].startswith("application/json" if plain else "text/event-stream")


@pytest.mark.parametrize("withdrawn", ["sharing", "list", "model"])
async def test_whoever_may_not_call_a_model_any_more_waits_for_it_no_longer(start_box: Start, withdrawn: str) -> None:
    box, key = await start_box(), "sk-test-inference"
    await box.engine("e0")
    box.serve("m")
    admins = await box.send("POST", "/v1/chat/completions", chat())
    wires = [await box.send("POST", "/v1/chat/completions", chat(stream=stream), key=key) for stream in (False, True)]
    await box.until(lambda: box.state.holds.models()["m"] == 3)
    if withdrawn == "sharing":
        box.models["m"]["owners"] = ["key_other"]
    elif withdrawn == "list":
        box.keys[digest(key)]["models"] = ["another"]
    else:
        del box.models["m"]
    box.apply()
    for wire in wires:
        answer = await wire.response()
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    if withdrawn != "model":
        box.serve("m", "e0")
    assert (await admins.response()).status == (404 if withdrawn == "model" else 200)
    assert waiting(box) == 0


async def test_a_model_that_is_not_tried_soon_is_refused_with_its_reason(start_box: Start) -> None:
    box = await start_box(holds={"requests": 1})
    box.serve("m")
    wire = await box.send("POST", "/v1/chat/completions", chat())
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    beyond = await box.ask("POST", "/v1/chat/completions", chat())
    assert (beyond.status, beyond.error["code"]) == (503, "model_not_ready"), "no more may wait"
    box.serve("m", trouble={"reason": "no memory", "next_try_s": time.time() + 40.0, "hold_before_s": 10.0})
    for response in (await wire.response(), await box.ask("POST", "/v1/chat/completions", chat())):
        assert response.status == 503 and response.error["code"] == "model_not_ready"
        assert 38 <= int(response.headers["retry-after"]) <= 40 and "no memory" in response.error["message"]
    assert waiting(box) == 0


async def test_draining_replica_finishes_its_work_and_gets_no_more(start_box: Start) -> None:
    box = await start_box()
    go_on = asyncio.Event()
    await box.engine("old", sends(*chat_events("hel"), go_on=go_on))
    await box.engine("new")
    box.serve("m", "old")
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True))
    await wire.head()
    box.serve("m", old="draining", new="open")
    for _ in range(5):
        assert (await box.ask("POST", "/v1/chat/completions", chat(stream=True))).body.endswith(b"[DONE]\n\n")
    assert len(box.engines["old"].requests) == 1
    assert load_report(box.state)["replicas"]["old"] == 1
    box.reports.clear()
    go_on.set()
    assert (await wire.response_body()).endswith(b"[DONE]\n\n")
    assert len(box.reports) == 1, "the zero of a draining replica is reported at once"
    assert load_report(box.state)["replicas"]["old"] == 0


@pytest.mark.parametrize("in_time", [True, False])
async def test_shutdown_lets_streams_finish_until_its_deadline(box: Box, in_time: bool) -> None:
    go_on = asyncio.Event()
    box.engines["e0"].script = sends(*chat_events("a"), go_on=go_on)
    box.serve("cold")
    idle, stream, held = [await box.connect() for _ in range(3)]
    await stream.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await stream.head()
    await held.send(request_bytes("POST", "/v1/chat/completions", chat("cold")))
    await box.until(lambda: waiting(box) == 1)
    if in_time:
        held.close()
        await box.until(lambda: waiting(box) == 0)
    stopping = asyncio.ensure_future(box.gateway.stop(10 if in_time else 0.02))
    assert await idle.eof() == b""
    if in_time:
        go_on.set()
        assert (await stream.response_body()).endswith(b"[DONE]\n\n")
    else:
        assert b'"code":"shutting_down"' in await stream.eof()
        assert (await held.response()).status == 503
    await asyncio.wait_for(stopping, 60)
    assert not box.state.connections
