"""Requests queue in the gateway for the slots of engines that are awake; class batch gives way to people."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from appliance.gateway.main import load_report

from .conftest import Box, Start, Wire, chat, request_bytes, waiting
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_events

BATCH = "X-Appliance-Class: batch\r\n"
ANN = "sk-test-inference"
URL = "/v1/chat/completions"


class Engine:
    """Answers when it is told to. running: what the last message of each request says, in the order of arrival."""

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


async def crowded(start_box: Start, slots: int, **config: Any) -> tuple[Box, Engine]:
    box, engine = await start_box(**config), Engine()
    await box.engine("e0", engine)
    box.serve("m", "e0", slots=slots)
    return box, engine


async def send(box: Box, text: str, headers: str = "", key: str = "sk-test-all", **more: Any) -> Wire:
    wire = await box.connect()
    body = chat(messages=[{"role": "user", "content": text}], **more)
    await wire.send(request_bytes("POST", URL, body, key=key, headers=headers))
    return wire


async def test_engine_gets_a_quarter_more_than_its_slots_and_the_rest_waits(start_box: Start) -> None:
    box, engine = await crowded(start_box, 4)
    wires = [await send(box, str(n)) for n in range(8)]
    await box.until(lambda: len(engine.running) == 5 and waiting(box) == 3)
    report = load_report(box.state)["models"]["m"]
    assert (report["inflight"], report["held"]) == (5, 3), "demand, as before"
    for n in range(8):
        engine.end(str(n))
    assert {(await wire.response()).status for wire in wires} == {200}
    assert waiting(box) == 0 and box.state.router.loads["e0"].inflight == 0


async def test_batch_waits_for_half_of_the_slots_and_is_no_demand(start_box: Start) -> None:
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


async def test_batch_ends_on_a_drain_so_that_it_can_be_sent_again(start_box: Start) -> None:
    box, engine = await crowded(start_box, 4)
    plain, stream = await send(box, "plain", BATCH), await send(box, "stream", BATCH, stream=True)
    person = await send(box, "person")
    status, _, _ = await stream.head()
    await stream.chunk()
    await box.until(lambda: len(engine.running) == 3)
    box.serve("m", e0="draining", slots=4)
    answer = await plain.response()
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "batch_gives_way", "1")
    assert status == 200 and json.loads((await stream.chunk())[6:])["error"]["code"] == "batch_gives_way"
    await box.until(lambda: box.state.router.loads["e0"].inflight == 1)
    (row,) = box.state.spending.take_sums()
    assert (row["requests"], row["errors"]) == (1, 0) and row["prompt_tokens"] < 30, "of the stream, which had begun"
    engine.end("person")
    assert (await person.response()).status == 200


async def test_batch_that_gets_a_place_as_its_engine_drains_is_not_sent(start_box: Start) -> None:
    box, engine = await crowded(start_box, 2)
    box.serve("m", e0="draining")
    line = await send(box, "line", BATCH)
    await box.until(lambda: waiting(box, batch=True) == 1)
    for state in ("open", "draining"):  # within one turn of the loop
        box.serve("m", e0=state)
    refused = await line.response()
    assert (refused.status, refused.error["code"]) == (503, "batch_gives_way")
    assert not engine.seen and not box.state.router.loads["e0"].inflight


async def test_batch_has_an_allowance_of_its_own_and_waits_in_it(start_box: Start) -> None:
    box, engine = await crowded(start_box, 2)
    box.limit(requests_per_minute=2)
    lines = [await send(box, f"line{n}", BATCH) for n in range(2)]
    await box.until(lambda: len(engine.running) == 1)
    assert (await box.ask("POST", URL, chat(), headers=BATCH)).error["code"] == "rate_limit_exceeded"
    for text in ("line0", "line1", "hi"):
        engine.end(text)
    assert [(await line.response()).status for line in lines] == [200] * 2
    assert (await box.ask("POST", URL, chat())).status == 200
