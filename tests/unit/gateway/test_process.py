"""The gateway as the process that the box starts, asked by the unchanged `openai` client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.core.errors import ConfigInvalid

from .conftest import KEY, chat
from .test_bus import DummyBus
from .upstreams import DummyUpstream, answer_chat, chat_events, sends

ROOT = Path(__file__).parents[3]
HI: Any = chat()["messages"]
ACCESS_FIELDS = (
    "time level process event request_id key_id model version replica trace_id method path status ttft_s duration_s"
    " prompt_tokens completion_tokens in_bytes out_bytes"
)


class Running:
    """A gateway process with its bus."""

    def __init__(self, process: asyncio.subprocess.Process, bus: DummyBus, folder: Path) -> None:
        self.process, self.bus, self.folder = process, bus, folder
        self.port = 0

    async def listening(self) -> str:
        assert self.process.stdout is not None
        line = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        assert line["event"] == "listening"
        self.port = line["port"]
        return line["host"]

    async def table(self, replica: str) -> None:
        """Push a table with the model `m` on this engine, and one key."""
        keys = {hashlib.sha256(KEY.encode()).hexdigest(): {"id": "k", "scopes": ["inference"]}}
        row = {"id": replica, "socket": str(self.folder / f"{replica}.sock"), "version": "v1", "state": "open"}
        models = {"m": {"version": "v1", "task": "generate", "replicas": [row]}}
        await self.bus.push({"type": "table", "generation": 1, "models": models, "keys": keys})
        await self.bus.report(generation=1)


Launch = Callable[..., Awaitable[Running]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    folder = Path(f"/tmp/gwp-{os.getpid()}-{abs(hash(tmp_path)) % 10**6}")
    folder.mkdir(mode=0o700)
    running: list[Running] = []

    async def start(**overrides: Any) -> Running:
        bus = DummyBus(str(folder / "bus.sock"))
        await bus.start()
        config = {
            "controller_socket": str(folder / "controller.sock"),
            "bus_socket": str(folder / "bus.sock"),
            "port": 0,
            "log_path": str(tmp_path / "access.log"),
            **overrides,
        }
        (tmp_path / "gateway.json").write_text(json.dumps(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "appliance.gateway.main",
            "--config",
            str(tmp_path / "gateway.json"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
        )
        box = Running(process, bus, folder)
        running.append(box)
        await asyncio.wait_for(bus.connected.wait(), 60)
        return box

    yield start
    for box in running:
        if box.process.returncode is None:
            box.process.kill()
            await box.process.wait()
        await box.bus.stop()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


async def test_process_serves_the_sdk_and_logs_each_request(launch: Launch, tmp_path: Path) -> None:
    box = await launch()
    assert await box.listening() == "127.0.0.1"
    engine = await DummyUpstream(str(box.folder / "e.sock"), answer_chat).start()
    await box.table("e")
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{box.port}/v1", api_key=KEY, timeout=20)
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=HI)
    assert raw.parse().choices[0].message.content == "hello"
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found" and unknown.value.request_id
    engine.script = sends(chat_events("hel", "lo")[0], b"data: x")
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="failed while answering"):
        async for _ in stream:
            pass
    await client.close()
    box.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(box.process.wait(), 60) == 0
    await engine.stop()
    log = tmp_path / "access.log"
    assert log.stat().st_mode & 0o777 == 0o600 and KEY not in log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {" ".join(line) for line in lines} == {ACCESS_FIELDS}
    whole, streamed = [line for line in lines if line["model"] == "m"][:2]
    assert whole["request_id"] == raw.headers["x-request-id"]
    assert (whole["key_id"], whole["version"], whole["replica"], whole["status"]) == ("k", "v1", "e", 200)
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (3, 2)
    assert 0 < whole["ttft_s"] <= whole["duration_s"] < 20 and 0 < streamed["ttft_s"] <= streamed["duration_s"]
    assert abs(datetime.fromisoformat(whole["time"]).timestamp() - time.time()) < 60
    # The process's own log names the request whose stream broke.
    events = [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines()]
    broken = next(event for event in events if event["level"] == "warning")
    assert broken["process"] == "gateway" and broken["replica"] == "e"
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
def test_config_errors_name_the_key(data: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigInvalid, match=where):
        GatewayConfig.from_mapping(data)


def test_bad_config_is_exit_2(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text('{"port": 1}')
    done = subprocess.run(
        [sys.executable, "-m", "appliance.gateway.main", "--config", str(tmp_path / "gateway.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
