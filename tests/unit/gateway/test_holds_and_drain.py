"""Requests wait for replicas; drained replicas get nothing new; keys and models change under way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any

import pytest

from appliance.gateway.core.router import Router
from appliance.gateway.server.reports import load_report

from .conftest import KEY, Box, Start, chat, request_bytes
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_events, sends


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
    for i in range(5):
        wire = await box.connect()
        await wire.send(request_bytes("POST", "/v1/chat/completions", chat(seed=i, stream=i % 2 == 0)))
        await box.until(lambda i=i: box.state.holds.held("m") == i + 1)
        wires.append(wire)
    assert load_report(box.state)["models"]["m"]["held"] == 5
    assert load_report(box.state)["models"]["m"]["inflight"] == 0
    assert True in box.changes, "the first held request must be reported at once: a sleeping model wakes on it"
    box.serve("m", "e0")
    responses = [await wire.response() for wire in wires]
    assert [response.status for response in responses] == [200] * 5
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert responses[0].body == b"".join(chat_events("hel", "lo"))
    assert box.state.holds.count == 0


async def test_held_stream_gets_comments_then_its_answer(start_box: Start) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0, "sse_interval_s": 0.01})
    await box.engine("e0")
    box.serve("m")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    status, headers, _ = await wire.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert await wire.chunk() == b": held\n\n"
    assert await wire.chunk() == b": held\n\n"
    box.serve("m", "e0")
    body = b""
    while data := await wire.chunk():
        body += data
    events = [part for part in body.split(b"\n\n") if not part.startswith(b":")]
    assert b"\n\n".join(events) == b"".join(chat_events("hel", "lo"))
    assert b": version v1\n\n" in body


async def test_error_after_comments_is_an_event(start_box: Start) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0})

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.json({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)

    await box.engine("e0", script)
    box.serve("m")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await wire.head()
    await wire.chunk()
    box.serve("m", "e0")
    data = await wire.chunk()
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "too long"
    assert await wire.chunk() == b""


async def test_past_the_deadline_503_with_retry_after(start_box: Start) -> None:
    box = await start_box(holds={"hold_s": 0.03})
    box.serve("m")
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 503 and response.error["code"] == "model_not_ready"
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert box.state.holds.count == 0


async def test_whoever_may_not_call_a_model_any_more_waits_for_it_no_longer(start_box: Start) -> None:
    """The sharing of a model ended, or a key's list was cut, while its requests were held: they were served later."""
    box = await start_box()
    engine = await box.engine("e0")
    key, digest = "sk-test-inference", hashlib.sha256(b"sk-test-inference").hexdigest()
    for withdraw in ("sharing", "list", "model"):
        box.keys[digest].pop("models", None)
        box.serve("m")
        wires = []
        for place, asking in enumerate((KEY, key, key)):
            wires.append(await box.connect())
            stream = place == 2 and withdraw == "sharing"
            await wires[-1].send(request_bytes("POST", "/v1/chat/completions", chat(stream=stream), key=asking))
            await box.until(lambda place=place: box.state.holds.held("m") == place + 1)
        if withdraw == "sharing":
            box.models["m"]["owners"] = ["key_other"]
        elif withdraw == "list":
            box.keys[digest]["models"] = ["another"]
        else:
            del box.models["m"]
        box.apply()
        for wire in wires[1:]:
            answer = await wire.response()
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        if withdraw == "model":
            assert (await wires[0].response()).status == 404
        else:
            box.serve("m", "e0")
            assert (await wires[0].response()).status == 200, "an admin, and whoever still may, waits on"
        assert box.state.holds.count == 0
    assert len(engine.requests) == 2


def trouble(in_s: float, reason: str = "no memory for it", hold_before_s: float = 10.0) -> dict[str, Any]:
    return {"reason": reason, "next_try_s": time.time() + in_s, "hold_before_s": hold_before_s}


async def test_who_waits_for_a_model_that_is_not_tried_soon_is_told_why_and_when(start_box: Start) -> None:
    box = await start_box()
    box.serve("m")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
    await box.until(lambda: box.state.holds.held("m") == 1)
    box.serve("m", trouble=trouble(40.0))
    for response in (await wire.response(), await box.ask("POST", "/v1/chat/completions", chat())):
        assert response.status == 503 and response.error["code"] == "model_not_ready"
        wait_s = int(response.headers["retry-after"])
        assert 38 <= wait_s <= 40
        told = f"The model `m` is not serving: no memory for it. The next try is in {wait_s} s."
        assert response.error["message"] == told
    assert box.state.holds.count == 0


async def test_bounds_on_what_may_wait(start_box: Start) -> None:
    box = await start_box(holds={"requests": 2})
    box.serve("a")
    for i in range(2):
        wire = await box.connect()
        await wire.send(request_bytes("POST", "/v1/chat/completions", chat("a")))
        await box.until(lambda i=i: box.state.holds.count == i + 1)
    response = await box.ask("POST", "/v1/chat/completions", chat("a"))
    assert (response.status, response.error["code"]) == (503, "model_not_ready")


async def test_client_that_leaves_while_held_is_forgotten(start_box: Start) -> None:
    box = await start_box()
    box.serve("m")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat()))
    await box.until(lambda: box.state.holds.count == 1)
    wire.close()
    await box.until(lambda: box.state.holds.count == 0)
    assert box.state.buffered_bytes == 0


async def test_draining_replica_finishes_its_work_and_gets_no_more(start_box: Start) -> None:
    box = await start_box()
    go_on = asyncio.Event()

    async def slow(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(chat_events("hel")[0])
        await go_on.wait()
        await reply.chunk(b"data: [DONE]\n\n")
        await reply.end()

    await box.engine("old", slow)
    await box.engine("new")
    box.serve("m", "old")
    wire = await box.connect()
    await wire.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await wire.head()
    box.serve("m", old="draining", new="open")
    for _ in range(5):
        assert (await box.ask("POST", "/v1/chat/completions", chat(stream=True))).body.endswith(b"[DONE]\n\n")
    assert len(box.engines["old"].requests) == 1
    assert load_report(box.state)["replicas"]["old"]["inflight"] == 1
    box.changes.clear()
    go_on.set()
    assert (await wire.response_body()).endswith(b"[DONE]\n\n")
    assert box.changes == [True], "the zero of a draining replica is reported at once"
    assert load_report(box.state)["replicas"]["old"]["inflight"] == 0


async def test_key_revoked_mid_stream_ends_the_stream_and_refuses_the_next(box: Box) -> None:
    box.engines["e0"].script = sends(chat_events("a")[0], ends=False)
    wires = {}
    for key in ("sk-test-inference", "sk-test-all"):
        wires[key] = await box.connect()
        await wires[key].send(request_bytes("POST", "/v1/chat/completions", chat(stream=True), key=key))
        await wires[key].head()
        await wires[key].chunk()
    box.keys = {digest: row for digest, row in box.keys.items() if row["id"] != "key_inference"}
    box.apply()
    data = await wires["sk-test-inference"].chunk()
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "invalid_api_key"
    assert await wires["sk-test-inference"].chunk() == b""
    refused = await box.ask("POST", "/v1/chat/completions", chat(), key="sk-test-inference")
    assert refused.status == 401
    await box.until(lambda: load_report(box.state)["replicas"]["e0"]["inflight"] == 1)


async def test_shutdown_lets_streams_finish_and_refuses_new_ones(box: Box) -> None:
    go_on = asyncio.Event()

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.sse_head()
        await reply.chunk(chat_events("a")[0])
        await go_on.wait()
        await reply.chunk(b"data: [DONE]\n\n")
        await reply.end()

    box.engines["e0"].script = script
    idle, busy = await box.connect(), await box.connect()
    await busy.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await busy.head()
    stopping = asyncio.ensure_future(box.gateway.stop(10))
    assert await idle.eof() == b""
    go_on.set()
    assert (await busy.response_body()).endswith(b"[DONE]\n\n")
    await asyncio.wait_for(stopping, 60)
    assert not box.state.connections


async def test_shutdown_deadline_ends_streams_with_an_error_event(start_box: Start) -> None:
    box = await start_box()
    await box.engine("e0", sends(chat_events("a")[0], ends=False))
    box.serve("m", "e0")
    box.serve("cold")
    stream, held = await box.connect(), await box.connect()
    await stream.send(request_bytes("POST", "/v1/chat/completions", chat(stream=True)))
    await stream.head()
    await held.send(request_bytes("POST", "/v1/chat/completions", chat("cold")))
    await box.until(lambda: box.state.holds.count == 1)
    await box.gateway.stop(0.02)
    assert b'"code":"shutting_down"' in await stream.eof()
    assert (await held.response()).status == 503


async def test_attempts_that_reach_no_engine_end_with_the_holds_deadline(
    start_box: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of a lost node: while one took its time to connect, the other's pause was over."""
    monkeypatch.setattr(Router, "fail", lambda *_: None)
    box = await start_box(holds={"hold_s": 0.05})
    box.serve("m", "e0", "e1")
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert (response.status, response.error["code"]) == (503, "model_not_ready")
    assert not box.state.router.loads["e0"].inflight and not box.state.holds.count
