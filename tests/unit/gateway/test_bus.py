"""The gateway's end of the bus, against a controller's end in the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.gateway.main import COUNTED

from .conftest import Box, chat
from .upstreams import Reply, UpstreamRequest, chat_answer


class DummyBus:
    """The controller's end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        self.connected.set()
        while line := await reader.readline():
            self.reports.put_nowait(json.loads(line))
        self.writers.discard(writer)

    async def push(self, data: bytes | dict[str, Any]) -> None:
        assert self.writers
        for writer in self.writers:
            writer.write(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")
            await writer.drain()

    async def report(self, **wanted: Any) -> dict[str, Any]:
        """The next report that has these values."""
        async with asyncio.timeout(60):
            while True:
                report = await self.reports.get()
                if report["type"] == "load" and all(report[key] == value for key, value in wanted.items()):
                    return report

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        self.connected.clear()


@pytest.fixture
async def bus(box: Box) -> AsyncIterator[DummyBus]:
    """A box whose gateway is connected to a dummy bus."""
    bus = DummyBus(box.gateway.config.bus_socket)
    await bus.start()
    client = asyncio.ensure_future(box.gateway.run_bus())
    await asyncio.wait_for(bus.connected.wait(), 60)
    yield bus
    client.cancel()
    await bus.stop()


async def test_tables_are_applied_and_acknowledged_at_once(box: Box, bus: DummyBus) -> None:
    box.models["n"] = {**box.models["m"], "version": "v9"}
    await bus.push({**box.table(), "generation": 77})
    report = await bus.report(generation=77)
    assert report["models"] == {}, "only models that somebody has asked"
    assert report["replicas"] == {"e0": 0}


async def test_load_is_reported_as_it_changes(box: Box, bus: DummyBus) -> None:
    go_on = asyncio.Event()

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await go_on.wait()
        await reply.json(chat_answer())

    box.engines["e0"].script = script
    await bus.push(box.table())
    wire = await box.send("POST", "/v1/chat/completions", chat())
    async with asyncio.timeout(60):
        while (report := await bus.reports.get())["models"].get("m", {}).get("inflight") != 1:
            pass
    assert report["replicas"]["e0"] == 1 and report["models"]["m"]["last_request_s"] > 1e9
    go_on.set()
    assert (await wire.response()).status == 200


async def test_usage_is_sent_again_until_it_is_counted(box: Box, bus: DummyBus) -> None:
    async def usage() -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while (message := await bus.reports.get())["type"] != "usage":
                pass
        return message["rows"]

    await box.ask("POST", "/v1/chat/completions", chat())
    first = await usage()
    await bus.stop()
    await box.ask("POST", "/v1/chat/completions", chat("nobody"))
    await bus.start()
    box.state.report_now()
    await asyncio.wait_for(bus.connected.wait(), 60)
    assert await usage() == first and first[0]["requests"] == 1
    await bus.push(COUNTED)
    await bus.push(box.table())
    assert [row["refused"] for row in await usage()] == [1]


GOOD_REPLICA = {"id": "e", "socket": "/s", "version": "v1", "state": "open"}
