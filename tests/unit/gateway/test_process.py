"""The gateway as a process, called with the unmodified `openai` client, and the gateway's side of the bus."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.main import COUNTED

from .conftest import KEY, Box, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_answer, chat_events, sends


class DummyBus:
    """A fake controller's side of the bus, which records the gateway's messages."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
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
            self.messages.put_nowait(json.loads(line))
        self.writers.discard(writer)

    async def push(self, data: bytes | dict[str, Any]) -> None:
        assert self.writers
        for writer in self.writers:
            writer.write(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")
            await writer.drain()

    async def next(self, **wanted: Any) -> dict[str, Any]:
        """Wait for the next message that has these values; return it."""
        async with asyncio.timeout(60):
            while (message := await self.messages.get()) | wanted != message:
                pass
        return message

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        self.connected.clear()


@pytest.fixture
async def bus(box: Box) -> AsyncIterator[DummyBus]:
    """Connect the gateway of `box` to a dummy bus; yield the bus."""
    bus = DummyBus(box.gateway.config.bus_socket)
    await bus.start()
    client = asyncio.ensure_future(box.gateway.run_bus())
    await asyncio.wait_for(bus.connected.wait(), 60)
    yield bus
    client.cancel()
    await bus.stop()


async def test_bus_table_is_applied_and_acknowledged_at_once(box: Box, bus: DummyBus) -> None:
    box.models["n"] = {**box.models["m"], "version": "v9"}
    await bus.push({**box.table(), "generation": 77})
    report = await bus.next(generation=77)
    assert report["models"] == {}, "only models that somebody has asked"
    assert report["replicas"] == {"e0": 0}


async def test_bus_reports_load_changes(box: Box, bus: DummyBus) -> None:
    go_on = asyncio.Event()

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await go_on.wait()
        await reply.json(chat_answer())

    box.engines["e0"].script = script
    await bus.push(box.table())
    wire = await box.send("POST", "/v1/chat/completions", chat())
    report = await bus.next(replicas={"e0": 1})
    assert report["models"]["m"]["inflight"] == 1 and report["models"]["m"]["last_request_s"] > 1e9
    go_on.set()
    assert (await wire.response()).status == 200


async def test_bus_resends_usage_until_controller_acknowledges_it(box: Box, bus: DummyBus) -> None:
    await box.ask("POST", "/v1/chat/completions", chat())
    first = (await bus.next(type="usage"))["rows"]
    await bus.stop()
    await box.ask("POST", "/v1/chat/completions", chat("nobody"))
    await bus.start()
    box.state.report_now()
    await asyncio.wait_for(bus.connected.wait(), 60)
    assert (await bus.next(type="usage"))["rows"] == first and first[0]["requests"] == 1
    await bus.push(COUNTED)
    await bus.push(box.table())
    assert [row["refused"] for row in (await bus.next(type="usage"))["rows"]] == [1]


ROOT = Path(__file__).parents[3]
HI: Any = chat()["messages"]
ACCESS_FIELDS = (
    "time level process event request_id key_id model version replica trace_id method path status ttft_s duration_s"
    " prompt_tokens completion_tokens in_bytes out_bytes"
)


async def test_process_serves_openai_sdk_and_logs_each_request(start_box: Start, tmp_path: Path) -> None:
    box = await start_box(engine=answer_chat)  # provides the socket folder, the engine and the table
    bus = DummyBus(str(box.folder / "bus.sock"))
    await bus.start()
    log, config = tmp_path / "access.log", tmp_path / "gateway.json"
    places = {"controller_socket": str(box.folder / "c.sock"), "bus_socket": bus.path, "log_path": str(log)}
    config.write_text(json.dumps({**places, "port": 0}))
    command = [sys.executable, "-m", "appliance.gateway.main", "--config", str(config)]
    stderr = (tmp_path / "stderr").open("w")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    await asyncio.wait_for(bus.connected.wait(), 60)
    assert process.stdout is not None
    line = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert (line["event"], line["host"]) == ("listening", "127.0.0.1")
    await bus.push({**box.table(), "generation": 1})
    await bus.next(generation=1)
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{line['port']}/v1", api_key=KEY, timeout=20)
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=HI)
    assert raw.parse().choices[0].message.content == "hello"
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found" and unknown.value.request_id
    box.engines["e0"].script = sends(chat_events("hel", "lo")[0], b"data: x")
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="failed while answering"):
        async for _ in stream:
            pass
    await client.close()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0
    await bus.stop()
    assert log.stat().st_mode & 0o777 == 0o600 and KEY not in log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {" ".join(line) for line in lines} == {ACCESS_FIELDS}
    whole, streamed = [line for line in lines if line["model"] == "m"][:2]
    assert whole["request_id"] == raw.headers["x-request-id"]
    assert (whole["key_id"], whole["version"], whole["replica"], whole["status"]) == ("key_all", "v1", "e0", 200)
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (3, 2)
    assert 0 < whole["ttft_s"] <= whole["duration_s"] < 20 and 0 < streamed["ttft_s"] <= streamed["duration_s"]
    assert abs(datetime.fromisoformat(whole["time"]).timestamp() - time.time()) < 60
    # The log of the gateway has the id of the request whose stream broke off.
    events = [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines()]
    broken = next(event for event in events if event["level"] == "warning")
    assert broken["process"] == "gateway" and broken["replica"] == "e0"
    assert broken["request_id"] in {line["request_id"] for line in lines}


def test_gateway_imports_nothing_heavy() -> None:
    code = (
        "import sys, appliance.gateway.main\n"
        "print([n for n in ('torch', 'vllm', 'ray', 'fastapi', 'pydantic', 'httpx', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SOCKETS = {"controller_socket": "/c", "bus_socket": "/b"}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({}, "missing required field `controller_socket`"),
        ({**SOCKETS, "port": "8000"}, "port: '8000' given"),
        ({**SOCKETS, "limits": {"sequences": -1}}, r"limits\.sequences: -1 given"),
        ({**SOCKETS, "tls_cert_path": "x"}, "tls_cert_path and tls_key_path"),
    ],
)
def test_process_config_error_names_the_setting(data: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigInvalid, match=where):
        GatewayConfig.from_mapping(data)
