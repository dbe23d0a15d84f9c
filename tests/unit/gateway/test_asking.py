"""The box's client at a gateway's private socket: what it gets is of the key that it names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from appliance.controller.bus.asking import Asker, Asking
from appliance.controller.interfaces.records import EngineAnswer

from .conftest import Box, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat

URL = "/v1/chat/completions"


@pytest.fixture
async def box(start_box: Start, listener: socket.socket) -> Box:
    box = await start_box(private=listener)
    await box.engine("e0")
    box.serve("m", "e0", slots=4)
    return box


@pytest.fixture
async def asking(box: Box, listener: socket.socket) -> AsyncIterator[Asking]:
    transport = httpx.AsyncHTTPTransport(uds=listener.getsockname())
    made = Asking(transport, lambda: box.models, lambda name: name, lambda: None)
    yield made
    await made.close()


def ask(asking: Asking, key_id: str | None, **more: Any) -> asyncio.Task[EngineAnswer]:
    async def body() -> dict[str, Any]:
        return chat(**more)

    return asyncio.create_task(asking.ask(Asker(key_id, key_id or ""), "m", URL, body, "req_of_a_line"))


async def test_answers_come_for_the_key_and_its_usage_is_the_keys(box: Box, asking: Asking) -> None:
    answers = await asyncio.gather(*(ask(asking, "key_inference") for _ in range(6)))
    assert {answer.status for answer in answers} == {200} and answers[0].body["object"] == "chat.completion"
    assert answers[0].version == "v1"
    (row,) = box.state.spending.take_sums()
    assert (row["key"], row["requests"], row["errors"]) == ("key_inference", 6, 0)
    assert (await ask(asking, None)).status == 200, "the box itself"


async def test_refusals_are_answers(box: Box, asking: Asking) -> None:
    answers = await asyncio.gather(ask(asking, "key_tuning"), ask(asking, "key_gone"), ask(asking, "key_all", n=0))
    assert [answer.status for answer in answers] == [403, 401, 400]


async def test_request_on_a_replica_that_drains_is_sent_again_to_another(box: Box, asking: Asking) -> None:
    began, end = asyncio.Event(), asyncio.Event()

    async def waits(request: UpstreamRequest, reply: Reply) -> None:
        began.set()
        await end.wait()

    box.engines["e0"].script = waits
    task = ask(asking, "key_all")
    await asyncio.wait_for(began.wait(), 60)
    await box.engine("e1", answer_chat)
    box.serve("m", e0="draining", e1="open", slots=4)
    asking.table_changed()
    assert (await asyncio.wait_for(task, 60)).status == 200
    end.set()


async def test_revoked_key_ends_what_an_engine_is_at(box: Box, asking: Asking) -> None:
    began = asyncio.Event()

    async def waits(request: UpstreamRequest, reply: Reply) -> None:
        began.set()
        await asyncio.Event().wait()

    box.engines["e0"].script = waits
    task = ask(asking, "key_all")
    await asyncio.wait_for(began.wait(), 60)
    box.keys.clear()
    box.apply()
    answer = await asyncio.wait_for(task, 60)
    assert (answer.status, answer.body["error"]["code"]) == (401, "invalid_api_key")
