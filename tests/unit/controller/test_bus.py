"""The bus sends tables to gateways, reads load reports and confirms drains; `Asking` sends requests of the box."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import orjson
import pytest

from appliance.controller.bus import asking
from appliance.controller.bus.asking import Asking, EngineAnswer
from appliance.controller.bus.bus import Bus, ModelLoad
from appliance.controller.interfaces.config import ControllerConfig
from appliance.store import keys
from appliance.store.database import Database
from runtime.background_tasks import BackgroundTasks


class GatewayEnd:
    """A fake gateway that applies tables only on command. opened: all instances, which `running` closes at its end."""

    opened: ClassVar[list[GatewayEnd]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.opened.append(self)

    @classmethod
    async def connect(cls, path: Path) -> GatewayEnd:
        return cls(*await asyncio.open_unix_connection(path, limit=2**24))

    async def table(self) -> dict[str, Any]:
        return json.loads(await asyncio.wait_for(self._reader.readline(), 60))

    async def report(self, generation: int, replicas: dict[str, int] | None = None, **models: dict[str, Any]) -> None:
        await self.send({"type": "load", "generation": generation, "replicas": replicas or {}, "models": models})

    async def send(self, message: Any) -> None:
        self._writer.write((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


def models(**states: str) -> dict[str, Any]:
    """Return a table with one model, whose replicas are in these states."""
    replicas = [
        {"id": name, "socket": f"/run/{name}.sock", "version": "v1", "state": state} for name, state in states.items()
    ]
    return {"m": {"version": "v1", "replicas": replicas, "task": "generate"}}


@asynccontextmanager
async def running(folder: Path, **config: Any) -> AsyncIterator[tuple[Bus, Path]]:
    path = folder / "bus.sock"
    bus = Bus(path, ControllerConfig(**config), first_generation=100, background=BackgroundTasks())
    await bus.start()
    try:
        yield bus, path
    finally:
        while GatewayEnd.opened:
            await GatewayEnd.opened.pop().close()
        await bus.stop()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with running(tmp_path) as (opened, _):
        yield opened


async def reported(bus: Bus, replica_id: str, inflight: int) -> None:
    """Wait until the bus has read a report with `inflight` open requests on this replica."""
    async with asyncio.timeout(60):
        while bus.inflight(replica_id) != inflight:
            await asyncio.sleep(0)


async def test_bus_sends_table_and_every_change(bus: Bus, tmp_path: Path):
    bus.publish(keys={"ab" * 32: {"id": "k", "name": "n", "scopes": ["inference"]}})
    gateway = await GatewayEnd.connect(tmp_path / "bus.sock")
    first = await gateway.table()
    assert first["type"] == "table" and first["generation"] == 101 and first["models"] == {}
    assert first["keys"] == {"ab" * 32: {"id": "k", "name": "n", "scopes": ["inference"]}}
    assert bus.publish(models=models(r1="open")) == 102
    second = await gateway.table()
    assert second["generation"] == 102 and second["models"] == models(r1="open") and second["keys"] == first["keys"]
    assert bus.publish(models=models(r1="open")) == 102, "the same table again is not news"
    bus.publish(keys={})
    assert (await gateway.table())["keys"] == {}


async def test_bus_keeps_last_load_and_sums_arrivals(bus: Bus, tmp_path: Path):
    gateway = await GatewayEnd.connect(tmp_path / "bus.sock")
    for inflight in (2, 5):
        await gateway.report(100, {"r1": inflight}, m={"inflight": inflight, "arrived_prompts": {"4": inflight}})
        await reported(bus, "r1", inflight)
    assert bus.load().models["m"] == ModelLoad(inflight=5, arrived_prompts={4: 5})
    assert bus.take_arrivals() == {"m": {4: 7}} and not bus.take_arrivals()


async def test_wait_drained_requires_newest_table_and_no_requests(bus: Bus, tmp_path: Path):
    gateway = await GatewayEnd.connect(tmp_path / "bus.sock")
    opened = bus.publish(models=models(r1="open"))
    await gateway.report(opened, {"r1": 1})
    await reported(bus, "r1", 1)
    draining = bus.publish(models=models(r1="draining"))
    waiting = asyncio.create_task(bus.wait_drained("r1"))
    # Idle, but the gateway still has the old table, so a request may be on its way to r1.
    await gateway.report(opened, {"r1": 0})
    await reported(bus, "r1", 0)
    assert not waiting.done()
    await gateway.report(draining, {"r1": 2})
    await reported(bus, "r1", 2)
    assert not waiting.done()
    await gateway.report(draining, {"r1": 0})
    await waiting


async def test_wait_drained_drops_lost_gateway_after_grace_period(tmp_path: Path):
    async with running(tmp_path, gateway_gone_after_s=0.1) as (bus, path):
        gateway = await GatewayEnd.connect(path)
        generation = bus.publish(models=models(r1="draining"))
        await gateway.report(generation, {"r1": 3})
        await reported(bus, "r1", 3)
        await gateway.close()
        began = asyncio.get_running_loop().time()
        await bus.wait_drained("r1")
        assert asyncio.get_running_loop().time() - began > 0.05
        assert bus.load().replicas == {}


async def test_wait_drained_counts_only_newest_report_of_reconnected_gateway(tmp_path: Path):
    async with running(tmp_path, gateway_gone_after_s=60) as (bus, path):
        first = await GatewayEnd.connect(path)
        generation = bus.publish(models=models(r1="draining"))
        await first.report(generation, {"r1": 3})
        await reported(bus, "r1", 3)
        await first.close()
        second = await GatewayEnd.connect(path)
        waiting = asyncio.create_task(bus.wait_drained("r1"))
        await second.report(generation, {"r1": 1})
        await reported(bus, "r1", 1)  # not 3 + 1: the new report replaces the report of the lost connection
        assert not waiting.done()
        await second.report(generation)
        await waiting


async def test_wait_drained_after_restart_waits_for_report_on_new_table(tmp_path: Path):
    async with running(tmp_path, gateway_gone_after_s=60) as (bus, path):
        bus.publish(models=models(r1="draining"))
        waiting = asyncio.create_task(bus.wait_drained("r1"))
        gateway = await GatewayEnd.connect(path)
        table = await gateway.table()
        await gateway.report(50, {"r1": 1})  # the gateway still has the table of the previous controller
        await reported(bus, "r1", 1)
        await gateway.report(50, {"r1": 0})
        await reported(bus, "r1", 0)
        assert not waiting.done()
        await gateway.report(table["generation"])
        await waiting


async def test_waits_for_gateways_end_if_no_gateway_connects(tmp_path: Path):
    async with running(tmp_path, gateway_gone_after_s=0.2) as (bus, _):
        generation = bus.publish(models=models(r1="draining"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bus.wait_applied(generation), 0.01)
        await bus.wait_applied(generation)
        await bus.wait_drained("r1")


@pytest.mark.parametrize("line", [b"not json", b'{"type":"load","gateway":"g","generation":"x"}', b"[" * 5000])
async def test_invalid_message_closes_only_its_connection(bus: Bus, tmp_path: Path, line: bytes):
    bad = await GatewayEnd.connect(tmp_path / "bus.sock")
    await bad.table()
    await bad.send(line)
    assert await asyncio.wait_for(bad._reader.read(), 60) == b""
    good = await GatewayEnd.connect(tmp_path / "bus.sock")
    await good.report(100, {"r1": 1})
    await reported(bus, "r1", 1)


async def test_bus_keeps_connection_if_usage_cannot_be_stored(tmp_path: Path):
    taken: list[int] = []

    def take(rows: list[dict[str, Any]]) -> None:
        taken.append(len(rows))
        if len(taken) == 1:
            raise sqlite3.OperationalError("database or disk is full")

    async with running(tmp_path) as (bus, path):
        bus.on_usage = take
        gateway = await GatewayEnd.connect(path)
        for rows in (1, 2):
            await gateway.send({"type": "usage", "rows": [{}] * rows})
            await gateway.report(1, {"r1": rows})
            await reported(bus, "r1", rows)
        assert taken == [1, 2]
        assert [(await gateway.table())["type"] for _ in range(3)] == ["table", "counted", "counted"]


URL = "/v1/chat/completions"
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Gateway:
    """A fake gateway for requests of the box. said: the text of each request, oldest first."""

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


async def test_request_for_sleeping_model_wakes_it_and_explains_wait(db: Database):
    gateway = Gateway(db, engines=0)
    task = gateway.ask("hi")
    await turns()
    assert list(gateway.asking.models) == ["m"] and gateway.nudges == 1
    assert gateway.asking.why("key_ann", "m") == asking.NOT_AWAKE
    gateway.table["m"]["replicas"] = [{"state": "open"}]
    gateway.end.set()
    assert (await task).status == 200 and gateway.nudges == 2 and not gateway.asking.why("key_ann", "m")


async def test_ask_retries_request_refused_with_retry_after(db: Database):
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
async def test_ask_retries_absent_gateway_and_refuses_answer_that_is_not_json(db: Database, monkeypatch, error):
    monkeypatch.setattr(asking, "AWAY_RETRY_S", 0.01)
    gateway, left = Gateway(db), [error]

    async def answer(_: httpx.Request) -> httpx.Response:
        if left:
            raise left.pop()
        return httpx.Response(200, content=b"[")

    gateway.answer = answer
    refused = await gateway.ask("hi")
    assert (refused.status, refused.code, len(gateway.said)) == (502, asking.ENGINE_FAILED, 2)


async def test_ask_that_times_out_returns_504_with_reason(db: Database):
    gateway = Gateway(db, engines=0)
    found = await gateway.asking.ask(None, "m", URL, {"text": ""}, within_s=0.01)
    assert found.status == 504 and asking.NOT_AWAKE in found.error and not gateway.asking.models


async def test_ask_returns_401_only_after_key_has_ended(db: Database, monkeypatch):
    monkeypatch.setattr(asking, "AWAY_RETRY_S", 0.001)
    gateway, key = Gateway(db), keys.create(db, "ann", ["inference"])[0].id

    async def answer(_: httpx.Request) -> httpx.Response:
        if len(gateway.said) == 3:
            keys.revoke(db, key)
        return httpx.Response(401, json={"error": {"message": "no such key"}})

    gateway.answer = answer
    body = {"text": ""}
    assert (await gateway.asking.ask(key, "m", URL, body)).status == 401 and len(gateway.said) == 3
