"""Starts and stops the processes listed in tests/front/__init__.py; the test runs in its own thread and uses HTTP."""

import asyncio
import concurrent.futures
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import uvicorn
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from appliance.controller.app import create_app
from appliance.controller.bus.bus import Bus
from appliance.controller.context.context import ControllerContext
from appliance.controller.engines.versions import LibraryOps
from appliance.controller.interfaces.principal import Listener
from appliance.controller.main import _listen
from appliance.models.hub import HubSettings
from appliance.models.library import ModelLibrary
from appliance.store import keys
from appliance.store.database import Database
from tests.simulator.control_plane import SimulatedModelOps, change, simulated_context
from tests.unit.controller.conftest import insert_model
from tests.unit.gateway.upstreams import chat_answer, chat_events

ROOT = Path(__file__).parents[2]
MODEL = "starter"
TOKEN = "f" * 64


class Counts:
    """Counters over all connections of one engine. aborted: streams that the gateway broke off."""

    open = streaming = answered = aborted = 0


class ImportingOps(SimulatedModelOps):
    """Imports directories like a real box; supports nothing else."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        library = ModelLibrary(folder, hub_settings=HubSettings(allowed=False))
        real = LibraryOps(library, None, None, self.let_go, None)  # type: ignore[arg-type]
        self.library, self.run = real.library, real.run  # type: ignore[assignment, method-assign]


class Front:
    """A running front. `key` has every scope; `counts` are the engine's."""

    def __init__(self, folder: Path, key: str, port: int) -> None:
        self.folder, self.key, self.port = folder, key, port
        self.counts = Counts()
        self.context: ControllerContext | None = None
        self.url = f"http://127.0.0.1:{port}"
        self.gateway: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bus: Bus | None = None
        self._dies: asyncio.Event | None = None
        self._server: uvicorn.Server | None = None

    def http(self, key: str | None = None, **more: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **more)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread of the control app."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised again in the test's own thread
                done.set_exception(error)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        return done.result(30)

    def restart_control(self) -> None:
        """Kill the control app with all its connections; on return a new one listens."""
        dies, dead = self._dies, self._server
        assert dies is not None
        self.call(dies.set)
        self.wait(lambda: self._server is not dead and self._server is not None and self._server.started)

    def serve(self, state: str = "open", *, replicas: int = 1) -> None:
        """Route the model to its engine in `state`; replicas=0: to no engine."""
        rows = [
            {"id": f"r{n}", "socket": str(self.folder / "engine.sock"), "version": "v1", "state": state}
            for n in range(replicas)
        ]
        row = {"version": "v1", "task": "generate", "replicas": rows}
        bus = self._bus
        assert bus is not None and self._loop is not None

        async def publish() -> None:
            await asyncio.wait_for(bus.wait_applied(bus.publish(models={MODEL: row})), 30)

        asyncio.run_coroutine_threadsafe(publish(), self._loop).result(40)

    def inflight(self) -> int:
        """Number of requests at the engine, as the gateways report it to the controller."""
        assert self._bus is not None
        bus = self._bus
        return self.call(lambda: bus.inflight("r0"))

    def held(self) -> int:
        assert self._bus is not None
        bus = self._bus

        def read() -> int:
            found = bus.load().models.get(MODEL)
            return found.held if found else 0

        return self.call(read)

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
        pause = threading.Event()
        for _ in range(int(seconds / 0.05)):
            if condition():
                return
            pause.wait(0.05)
        raise TimeoutError("timeout: the condition of the test did not become true")

    @property
    def process(self) -> psutil.Process:
        """The process of the gateway."""
        assert self.gateway is not None
        return psutil.Process(self.gateway.pid)

    def rss_bytes(self) -> int:
        return self.process.memory_info().rss

    def descriptors(self) -> int:
        return self.process.num_fds()

    def peak_bytes(self) -> int:
        """Peak resident memory of the gateway."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def series(self, *names: str) -> dict[str, float]:
        """Metrics of the gateway, each summed over its labels."""
        with self.http() as client:
            families = text_string_to_metric_families(client.get("/metrics").text)
            samples = [sample for family in families for sample in family.samples]
        return {
            name: sum(sample.value for sample in samples if sample.name == f"appliance_gateway_{name}")
            for name in names
        }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_front(
    *, controller: dict[str, Any] | None = None, imports: bool = True, port: int | None = None, **gateway: Any
) -> Iterator[Front]:
    """A front with the model `MODEL` open on one engine; `controller` and `gateway`: settings that differ from the
    defaults; `port`: default a free port. All processes have ended on return."""
    folder = Path(tempfile.mkdtemp(prefix="front-", dir="/tmp"))  # short: a Unix socket's path has 107 bytes
    port = port or free_port()
    started: concurrent.futures.Future[Front] = concurrent.futures.Future()
    stopping = threading.Event()

    async def control() -> None:
        with Database(folder / "appliance.db") as db:
            _, key = keys.create(db, "everything", list(keys.SCOPES))
            insert_model(db, MODEL)
            front = Front(folder, key, port)
            context = simulated_context(folder, db, **(controller or {}))
            context.box["public_url"] = front.url
            if imports:
                change(context, model_ops=ImportingOps(folder / "models"))
            bus = context.bus
            loop = asyncio.get_running_loop()
            front._loop, front._bus, front.context = loop, bus, context
            context.spending.publish_keys()
            await bus.start()
            engine = await loop.create_unix_server(
                lambda: CannedEngine(front.counts), str(folder / "engine.sock"), backlog=2048
            )
            stopped = asyncio.ensure_future(asyncio.to_thread(stopping.wait))
            while not stopped.done():
                app = create_app(context)
                front._dies = asyncio.Event()
                async with app.router.lifespan_context(app):
                    config = uvicorn.Config(Listener(app, TOKEN), log_config=None, access_log=False, lifespan="off")
                    server = front._server = uvicorn.Server(config)
                    serving = asyncio.ensure_future(server.serve(sockets=[_listen(folder / "c.sock")]))
                    if not started.done():
                        started.set_result(front)
                    dies = asyncio.ensure_future(front._dies.wait())
                    await asyncio.wait({stopped, dies}, return_when=asyncio.FIRST_COMPLETED)
                    if dies.done():
                        for connection in list(server.server_state.connections):
                            connection.transport.abort()
                    dies.cancel()
                    server.should_exit = server.force_exit = True
                    await serving
            engine.close()
            await bus.stop()

    def run() -> None:
        try:
            uvloop.run(control())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="front")
    thread.start()
    try:
        front = started.result(60)
        (folder / "token").write_text(TOKEN)
        config = {
            "controller_socket": str(folder / "c.sock"),
            "token_path": str(folder / "token"),
            "bus_socket": str(folder / "bus.sock"),
            "port": port,
            "log_path": str(folder / "access.log"),
            "shutdown_s": 1,
            **gateway,
        }
        (folder / "gateway.json").write_text(json.dumps(config))
        with open(folder / "gateway.err", "wb") as errors:
            front.gateway = subprocess.Popen(
                [sys.executable, "-m", "appliance.gateway.main", "--config", str(folder / "gateway.json")],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert front.gateway.stdout is not None
        assert b'"event":"listening"' in front.gateway.stdout.readline(), (folder / "gateway.err").read_text()
        bus = front._bus
        assert bus is not None
        front.wait(lambda: front.call(lambda: bus._report is not None))
        front.serve()
        yield front
        assert front.gateway.poll() is None, "the gateway ended by itself"
        said = (folder / "gateway.err").read_text()
        assert "Traceback" not in said, said
    finally:
        if started.done() and not started.exception() and front.gateway is not None:
            front.gateway.terminate()
            front.gateway.wait(30)
            if front.gateway.stdout is not None:
                front.gateway.stdout.close()
        stopping.set()
        thread.join(30)
        shutil.rmtree(folder, ignore_errors=True)


# --- an engine on a Unix socket with canned answers, at the pace that the request sets


class CannedEngine(asyncio.Protocol):
    """One connection. The request's `user` sets the stream: "EVENTS PACE_S", else two events at once. `open`: the open
    connections; `answered`: number of complete answers. Both belong to the server's loop."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.transport: asyncio.Transport | None = None
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.counts.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.counts.open -= 1
        if self.timer is not None:
            self.timer.cancel()
            self.counts.streaming -= 1
            self.counts.aborted += 1
            self.timer = None

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = int(self.buffer[:end].lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(self.buffer) < end + 4 + length:
            return
        body = orjson.loads(self.buffer[end + 4 : end + 4 + length])
        self.buffer = b""
        assert self.transport is not None
        if not body.get("stream"):
            answer = orjson.dumps(chat_answer())
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
            self.counts.answered += 1
            return
        events, pace_s = (body.get("user") or "2 0").split()
        self.transport.write(_STREAM_HEAD)
        self.counts.streaming += 1
        self.timer = asyncio.get_running_loop().call_later(0, self.next, int(events), float(pace_s))

    def next(self, left: int, pace_s: float) -> None:
        assert self.transport is not None
        if not left:
            self.timer = None
            self.counts.streaming -= 1
            self.counts.answered += 1
            self.transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        if not self.paused:
            self.transport.write(_EVENT)
            left -= 1
        self.timer = asyncio.get_running_loop().call_later(pace_s, self.next, left, pace_s)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT = _chunk(chat_events(" word", done=False)[0])
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
