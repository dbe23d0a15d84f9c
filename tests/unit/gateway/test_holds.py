"""Requests wait for replicas and slots; draining replicas get no new requests; batch requests yield to interactive
ones.
"""

import asyncio
import json
import time
from typing import Any

import pytest

from appliance.gateway.main import load_report

from .conftest import Box, Start, Wire, chat, digest, waiting
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_events, gives, sends

URL = "/v1/chat/completions"
BATCH = "X-Appliance-Class: batch\r\n"


async def test_request_without_replica_is_held_until_one_opens(start_box: Start) -> None:
    box = await start_box()
    await box.engine("e0")
    box.serve("m")
    assert load_report(box.state)["models"] == {}, "nothing of models that nobody has asked"
    wires = []
    box.reports.clear()
    for i in range(5):
        wires.append(await box.send("POST", URL, chat(seed=i, stream=i % 2 == 0)))
        await box.until(lambda i=i: box.state.holds.models()["m"] == i + 1)
    report = load_report(box.state)["models"]["m"]
    assert (report["held"], report["inflight"]) == (5, 0)
    assert [one["models"]["m"]["held"] for one in box.reports] == [1], "a sleeping model wakes on the first, at once"
    box.serve("m", "e0")
    responses = [await wire.response() for wire in wires]
    assert [response.status for response in responses] == [200] * 5
    assert sorted(request.json["seed"] for request in box.engines["e0"].requests) == [0, 1, 2, 3, 4]
    assert responses[0].body == b"".join(chat_events("hel", "lo"))
    assert waiting(box) == 0


@pytest.mark.parametrize("refused", [False, True])
async def test_held_stream_gets_comments_before_its_answer(start_box: Start, refused: bool) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0, "sse_interval_s": 0.01})
    refuses = gives({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)
    await box.engine("e0", refuses if refused else answer_chat)
    box.serve("m")
    wire = await box.send("POST", URL, chat(stream=True))
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


@pytest.mark.parametrize("task", ["generate", "embed"])
async def test_held_stream_never_contains_plain_json_answer(start_box: Start, task: str) -> None:
    box = await start_box(holds={"sse_grace_s": 0.0, "sse_interval_s": 0.01})
    await box.engine("e0", gives({"object": "list"}))
    box.serve("m", task=task)
    path, body = ("/v1/embeddings", {"model": "m", "input": "x"}) if task == "embed" else (URL, chat())
    wire = await box.send("POST", path, body | {"stream": True})
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    await asyncio.sleep(0.05)
    box.serve("m", "e0", task=task)
    answer = await wire.response()
    plain = task == "embed"
    assert answer.status == 200 and (b"engine_failed" not in answer.body) is plain
    assert answer.headers["content-type"].startswith("application/json" if plain else "text/event-stream")


@pytest.mark.parametrize("withdrawn", ["sharing", "list", "model"])
async def test_held_request_ends_when_access_is_withdrawn(start_box: Start, withdrawn: str) -> None:
    box, key = await start_box(), "sk-test-inference"
    await box.engine("e0")
    box.serve("m")
    admins = await box.send("POST", URL, chat())
    wires = [await box.send("POST", URL, chat(stream=stream), key=key) for stream in (False, True)]
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


async def test_request_for_failing_model_without_early_retry_is_refused(start_box: Start) -> None:
    box = await start_box(holds={"requests": 1})
    box.serve("m", trouble={"reason": "no memory", "next_try_s": time.time() + 60.0, "hold_before_s": 90.0})
    wire = await box.send("POST", URL, chat())
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    beyond = await box.ask("POST", URL, chat())
    assert (beyond.status, beyond.error["code"]) == (503, "model_not_ready"), "no more may wait"
    box.serve("m", trouble={"reason": "no memory", "next_try_s": time.time() + 40.0, "hold_before_s": 10.0})
    for response in (await wire.response(), await box.ask("POST", URL, chat())):
        assert response.status == 503 and response.error["code"] == "model_not_ready"
        assert 38 <= int(response.headers["retry-after"]) <= 40 and "no memory" in response.error["message"]
    assert waiting(box) == 0


async def test_draining_replica_finishes_requests_and_gets_no_more(start_box: Start) -> None:
    box = await start_box()
    go_on, stream = asyncio.Event(), chat(stream=True)
    await box.engine("old", sends(*chat_events("hel"), go_on=go_on))
    await box.engine("new")
    box.serve("m", "old")
    wire = await box.send("POST", URL, chat(stream=True))
    await wire.head()
    box.serve("m", "old:draining", "new")
    for _ in range(5):
        assert (await box.ask("POST", URL, stream)).body.endswith(b"[DONE]\n\n")
    assert len(box.engines["old"].requests) == 1
    assert load_report(box.state)["replicas"]["old"] == 1
    box.reports.clear()
    go_on.set()
    assert (await wire.response_body()).endswith(b"[DONE]\n\n")
    assert len(box.reports) == 1, "the zero of a draining replica is reported at once"
    assert load_report(box.state)["replicas"]["old"] == 0


@pytest.mark.parametrize("in_time", [True, False])
async def test_shutdown_waits_for_streams_until_deadline(box: Box, in_time: bool) -> None:
    go_on = asyncio.Event()
    box.engines["e0"].script = sends(*chat_events("a"), go_on=go_on)
    box.serve("cold")
    idle, stream = await box.connect(), await box.send("POST", URL, chat(stream=True))
    await stream.head()
    held = await box.send("POST", URL, chat("cold"))
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


class Engine:
    """An engine that ends requests on command. running: the last message of each open request, oldest first."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.seen: list[UpstreamRequest] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def __call__(self, request: UpstreamRequest, reply: Reply) -> None:
        text = request.json["messages"][-1]["content"]
        self.running.append(text)
        self.seen.append(request)
        if request.json.get("stream"):
            await reply.sse_head()
            await reply.chunk(chat_events("hel")[0])
        await self._ends.setdefault(text, asyncio.Event()).wait()
        await answer_chat(request, reply)

    def end(self, text: str) -> None:
        self._ends.setdefault(text, asyncio.Event()).set()


async def crowded(start_box: Start, slots: int) -> tuple[Box, Engine]:
    engine = Engine()
    box = await start_box(engine=engine)
    box.serve("m", "e0", slots=slots)
    return box, engine


async def send(box: Box, text: str, headers: str = "", **more: Any) -> Wire:
    body = chat(messages=[{"role": "user", "content": text}], **more)
    return await box.send("POST", URL, body, headers=headers)


async def test_engine_gets_requests_for_125_percent_of_its_slots(start_box: Start) -> None:
    box, engine = await crowded(start_box, 4)
    trouble = {"reason": "no further one starts", "next_try_s": time.time() + 900.0, "hold_before_s": 10.0}
    box.serve("m", "e0", slots=4, trouble=trouble)
    wires = [await send(box, str(n)) for n in range(8)]
    await box.until(lambda: len(engine.running) == 5 and waiting(box) == 3)
    report = load_report(box.state)["models"]["m"]
    assert (report["inflight"], report["held"]) == (5, 3), "demand, as before"
    count = await box.send("POST", "/v1/messages/count_tokens", chat())
    await box.until(lambda: "hi" in engine.running)  # counting tokens needs no slot
    engine.end("hi")
    await count.response()
    for n in range(8):
        engine.end(str(n))
    assert {(await wire.response()).status for wire in wires} == {200}
    assert waiting(box) == 0 and box.state.router.loads["e0"].inflight == 0


async def test_batch_requests_use_half_of_slots_and_add_no_demand(start_box: Start) -> None:
    box, engine = await crowded(start_box, 4)
    wires = [await send(box, f"line{n}", BATCH) for n in range(3)]
    await box.until(lambda: len(engine.running) == 2 and waiting(box, batch=True) == 1)
    assert all(int(request.headers["x-vllm-priority"]) > 1 << 49 for request in engine.seen)
    assert "m" not in load_report(box.state)["models"], "it is no demand"
    assert load_report(box.state)["replicas"]["e0"] == 2, "a drain waits for them"
    wires.append(await send(box, "person"))
    await box.until(lambda: "person" in engine.running)
    engine.end("line0")
    await box.until(lambda: "line2" in engine.running)
    for text in engine.running:
        engine.end(text)
    assert [(await wire.response()).status for wire in wires] == [200] * 4
    assert sum(load_report(box.state)["models"]["m"]["arrived_prompts"].values()) == 1


async def test_batch_request_on_draining_engine_ends_with_retryable_error(start_box: Start) -> None:
    box, engine = await crowded(start_box, 4)
    plain, stream = await send(box, "plain", BATCH), await send(box, "stream", BATCH, stream=True)
    person = await send(box, "person")
    status, _, _ = await stream.head()
    await stream.chunk()
    await box.until(lambda: len(engine.running) == 3)
    box.serve("m", "e0:draining", slots=4)
    answer = await plain.response()
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "batch_gives_way", "1")
    assert status == 200 and json.loads((await stream.chunk())[6:])["error"]["code"] == "batch_gives_way"
    await box.until(lambda: box.state.router.loads["e0"].inflight == 1)
    (row,) = box.state.spending.take_sums()
    assert (row["requests"], row["errors"]) == (1, 0) and row["prompt_tokens"] < 30, "of the stream, which had begun"
    engine.end("person")
    assert (await person.response()).status == 200


async def test_batch_request_given_a_slot_of_draining_engine_is_not_sent(start_box: Start) -> None:
    box, engine = await crowded(start_box, 2)
    box.serve("m", "e0:draining")
    line = await send(box, "line", BATCH)
    await box.until(lambda: waiting(box, batch=True) == 1)
    box.serve("m", "e0")
    box.serve("m", "e0:draining")  # drains again before the event loop can send the request
    refused = await line.response()
    assert (refused.status, refused.error["code"]) == (503, "batch_gives_way")
    assert not engine.seen and not box.state.router.loads["e0"].inflight


async def test_batch_request_waits_for_its_own_rate_limit(start_box: Start) -> None:
    box, engine = await crowded(start_box, 2)
    box.limit(requests_per_minute=2)
    lines = [await send(box, f"line{n}", BATCH) for n in range(2)]
    await box.until(lambda: len(engine.running) == 1)
    assert (await box.ask("POST", URL, chat(), headers=BATCH)).error["code"] == "rate_limit_exceeded"
    for text in ("line0", "line1", "hi"):
        engine.end(text)
    assert [(await line.response()).status for line in lines] == [200] * 2
    assert (await box.ask("POST", URL, chat())).status == 200
