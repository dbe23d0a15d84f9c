"""Fixtures: a gateway in the test's event loop, with scripted engines and a scripted controller."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop

from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.core.table import Table, cache_salt, read_table
from appliance.gateway.main import Gateway, load_report
from appliance.gateway.server.state import State
from runtime.network import private_socket

from .upstreams import DummyUpstream, Script, answer_chat

KEY = "sk-test-all"
KEYS = {
    KEY: ("key_all", ["inference", "fine_tuning", "admin"]),
    "sk-test-inference": ("key_inference", ["inference"]),
    "sk-test-tuning": ("key_tuning", ["fine_tuning"]),
    "sk-test-admin": ("key_admin", ["admin"]),
    "sk-test-read": ("key_read", ["read"]),
    "sk-test-metrics": ("key_metrics", ["metrics"]),
}


@pytest.fixture
def event_loop_policy() -> Any:
    return uvloop.EventLoopPolicy()


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object, after a check that it has exactly OpenAI's shape."""
        data = json.loads(self.body)
        assert set(data) == {"error"}
        error = data["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return error


class Wire:
    """A client connection that sends and receives raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str], bytes]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name not in headers, f"{name} answered twice"
            headers[name] = value
        return int(first.split(" ")[1]), headers, raw

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; return b"" at the end of the body."""
        size = int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 60))[:-2], 16)
        return (await asyncio.wait_for(self.reader.readexactly(size + 2), 60))[:-2]

    async def response_body(self) -> bytes:
        """Read the remaining chunks of the body and return them joined."""
        body = b""
        while data := await self.chunk():
            body += data
        return body

    async def response(self) -> Response:
        status, headers, raw = await self.head()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            body = await self.response_body()
        elif "content-length" in headers:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), 60)
        return Response(status, headers, body, raw + body)

    async def eof(self) -> bytes:
        """Read all bytes until the peer closes the connection."""
        return await asyncio.wait_for(self.reader.read(-1), 60)

    def close(self) -> None:
        self.writer.transport.abort()


def digest(key: str) -> str:
    """Return the SHA-256 by which the table identifies a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def request_bytes(
    method: str, target: str, body: bytes | dict[str, Any] | None = None, *, key: str | None = KEY, headers: str = ""
) -> bytes:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    head = f"{method} {target} HTTP/1.1\r\nHost: box\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    if data is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return (head + headers + "\r\n").encode() + (data or b"")


def parse_table(data: Mapping[str, Any]) -> Table:
    """Parse a table message from `data`; raises msgspec.ValidationError if invalid."""
    return read_table(orjson.dumps({"type": "table", **data}))


def salted(body: bytes, owner: str = "key_all") -> bytes:
    """Return a request body as an engine receives it: with the cache salt of `owner`."""
    return orjson.dumps({**orjson.loads(body), "cache_salt": cache_salt(owner)})


def chat(model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


@dataclass
class Box:
    """A gateway with scripted engines and a routing table, which the test changes."""

    gateway: Gateway
    port: int
    folder: Path
    engines: dict[str, DummyUpstream] = field(default_factory=dict)
    controller: DummyUpstream = field(init=False)
    generation: int = 0
    models: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)

    @property
    def state(self) -> State:
        return self.gateway.state

    async def engine(self, name: str, script: Script = answer_chat) -> DummyUpstream:
        self.engines[name] = await DummyUpstream(str(self.folder / f"{name}.sock"), script).start()
        return self.engines[name]

    async def control(self, script: Script) -> DummyUpstream:
        self.controller = await DummyUpstream(self.gateway.config.controller_socket, script).start()
        return self.controller

    def serve(self, model: str, *replicas: str, **row: Any) -> None:
        """Serve a model on engines `NAME` or `NAME:draining`. row: more fields of the model's row in the table."""
        rows = [
            {"id": name, "socket": str(self.folder / f"{name}.sock"), "version": "v1", "state": state or "open"}
            for name, _, state in (replica.partition(":") for replica in replicas)
        ]
        self.models[model] = {"version": "v1", "replicas": rows, **row}
        self.apply()

    def table(self) -> dict[str, Any]:
        self.generation += 1
        return {"type": "table", "generation": self.generation, "models": self.models, "keys": self.keys}

    def limit(self, key: str = KEY, **limits: Any) -> None:
        """Change fields of a key's row and apply the table."""
        self.keys[digest(key)] |= limits
        self.apply()

    def revoke(self, key: str = KEY) -> None:
        del self.keys[digest(key)]
        self.apply()

    def apply(self) -> None:
        self.gateway.apply(parse_table(self.table()))

    async def connect(self) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port))
        self.wires.append(wire)
        return wire

    async def send(self, method: str, target: str, body: Any = None, **more: Any) -> Wire:
        """Open a connection, send this request, and return the connection."""
        wire = await self.connect()
        await wire.send(request_bytes(method, target, body, **more))
        return wire

    async def ask(self, method: str, target: str, body: Any = None, **more: Any) -> Response:
        return await (await self.send(method, target, body, **more)).response()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition is true; for conditions that no event signals."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)


def waiting(box: Box, batch: bool = False) -> int:
    """Return how many requests wait for a slot: batch requests if `batch`, else interactive requests."""
    return sum(len(queue) for (_, one), queue in box.state.holds.queues.items() if one is batch)


Start = Callable[..., Awaitable[Box]]


@pytest.fixture
async def start_box() -> AsyncIterator[Start]:
    """Yield a function that starts a box; its options override the config. engine: script of "e0", which serves "m"."""
    boxes: list[Box] = []
    folder = Path(tempfile.mkdtemp(prefix="gw-", dir="/tmp"))  # not tmp_path: a socket path has at most 107 bytes

    async def start(private: socket.socket | None = None, engine: Script | None = None, **overrides: Any) -> Box:
        sockets = {"controller_socket": str(folder / "controller.sock"), "bus_socket": str(folder / "bus.sock")}
        config = GatewayConfig.from_mapping({**sockets, "port": 0, "sweep_s": 0.01, "report_s": 0.01, **overrides})
        gateway = Gateway(config)
        box = Box(gateway, await gateway.listen(config.host, 0, private=private), folder)
        box.state.report_now = lambda: box.reports.append(load_report(box.state))
        box.keys = {digest(key): {"id": id, "scopes": scopes} for key, (id, scopes) in KEYS.items()}
        box.apply()
        boxes.append(box)
        if engine is not None:
            await box.engine("e0", engine)
            box.serve("m", "e0")
        return box

    yield start
    for box in boxes:
        for wire in box.wires:
            wire.close()
        await box.gateway.stop(0)
        for upstream in [*box.engines.values(), *([box.controller] if hasattr(box, "controller") else [])]:
            await upstream.stop()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    """Open the private socket, on which the box's own processes send requests to the gateway."""
    made = private_socket(tmp_path / "asking.sock")
    made.listen()
    made.setblocking(False)
    return made


@pytest.fixture
async def box(start_box: Start, listener: socket.socket) -> Box:
    """Start a box that listens on the private socket; its engine "e0" serves the model "m"."""
    return await start_box(private=listener, engine=answer_chat)
