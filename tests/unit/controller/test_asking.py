"""Asking models through the gateway: which models are wanted, and sending again as the gateway says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest

from appliance.controller.bus import asking
from appliance.controller.bus.asking import Asking, EngineAnswer
from appliance.store.database import Database
from appliance.store.records import keys

URL = "/v1/chat/completions"
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Gateway:
    """said: what each request says, in the order of arrival."""

    def __init__(self, db: Database, engines: int = 1):
        self.table: dict[str, Any] = {"m": {"replicas": [{"state": "open"}] * engines}}
        self.said, self.nudges = list[str](), 0
        self.end = asyncio.Event()
        self.answer: Answer = self.waits
        transport = httpx.MockTransport(self.posted)
        self.asking = Asking(db, transport, lambda: self.table, self.nudge)

    def nudge(self) -> None:
        self.nudges += 1

    async def posted(self, request: httpx.Request) -> httpx.Response:
        self.said.append(orjson.loads(request.content)["text"])
        return await self.answer(request)

    async def waits(self, _: httpx.Request) -> httpx.Response:
        await self.end.wait()
        return httpx.Response(200, json={"ok": True})

    def ask(self, text: str, owner: str = "ann", model: str = "m") -> asyncio.Task[EngineAnswer]:
        body = {"model": model, "text": text}
        return asyncio.create_task(self.asking.ask(f"key_{owner}", model, URL, body))


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_request_of_a_sleeping_model_wants_it_and_says_what_it_waits_for(db: Database):
    gateway = Gateway(db, engines=0)
    task = gateway.ask("hi")
    await turns()
    assert list(gateway.asking.models) == ["m"] and gateway.nudges == 1
    assert gateway.asking.why("key_ann", "m") == asking.NOT_AWAKE
    gateway.table["m"]["replicas"] = [{"state": "open"}]
    gateway.end.set()
    assert (await task).status == 200 and gateway.nudges == 2 and not gateway.asking.why("key_ann", "m")


async def test_request_that_gives_way_is_sent_again(db: Database):
    gateway = Gateway(db)
    refusals = [httpx.Response(503, headers={"retry-after": "0.01"}, json={"error": {"message": "busy"}})] * 3

    async def answer(_: httpx.Request) -> httpx.Response:
        return refusals.pop() if refusals else httpx.Response(200, json={})

    gateway.answer = answer
    first = gateway.ask("first")
    await turns()
    assert gateway.asking.why("key_ann", "m") == "busy"
    second = gateway.ask("second", "ben")
    assert {(await first).status, (await second).status} == {200}
    assert not gateway.asking.why("key_ann", "m") and gateway.said.count("first") + gateway.said.count("second") == 5


@pytest.mark.parametrize("error", [httpx.ConnectError("no"), httpx.ReadError("cut")])
async def test_ask_while_the_gateway_is_away_sends_again_and_refuses_what_is_not_json(db: Database, monkeypatch, error):
    monkeypatch.setattr(asking, "AWAY_RETRY_S", 0.01)
    gateway, left = Gateway(db), [error]

    async def answer(_: httpx.Request) -> httpx.Response:
        if left:
            raise left.pop()
        return httpx.Response(200, content=b"[")

    gateway.answer = answer
    refused = await gateway.ask("hi")
    assert (refused.status, refused.code, len(gateway.said)) == (502, asking.ENGINE_FAILED, 2)


async def test_request_that_waits_too_long_is_answered_with_the_reason(db: Database):
    gateway = Gateway(db, engines=0)
    found = await gateway.asking.ask(None, "m", URL, {"text": ""}, within_s=0.01)
    assert found.status == 504 and asking.NOT_AWAKE in found.error and not gateway.asking.models


async def test_request_is_refused_with_401_only_once_its_key_has_ended(db: Database, monkeypatch):
    monkeypatch.setattr(asking, "AWAY_RETRY_S", 0.001)
    gateway, key = Gateway(db), keys.create(db, "ann", ["inference"])[0].id

    async def answer(_: httpx.Request) -> httpx.Response:
        if len(gateway.said) == 3:
            keys.revoke(db, key)
        return httpx.Response(401, json={"error": {"message": "no such key"}})

    gateway.answer = answer
    body = {"text": ""}
    assert (await gateway.asking.ask(key, "m", URL, body)).status == 401 and len(gateway.said) == 3
