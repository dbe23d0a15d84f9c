"""Fixtures that run commands in this process against two kinds of boxes.

One is the real control app on simulated devices; the other is a server with prepared answers, for load and failures."""

import asyncio
import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from appliance.cli import command
from appliance.cli.commands import jobs
from appliance.cli.main import main
from appliance.controller.app import create_app
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import Listener
from appliance.controller.jobs.events import JobEvents
from appliance.store.database import Database
from tests.simulator.control_plane import simulated_context
from tests.simulator.routes import routes_are_analysed_once  # noqa: F401
from tests.unit.controller.conftest import insert_model


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command, jobs):
        monkeypatch.setattr(module, "POLL_S", 0.01)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Delete the user's APPLIANCE_* variables and set HOME to a directory without a box."""
    for name in ("URL", "API_KEY", "DATA_DIR", "CONFIG", "HOST", "PORT", "DEVICES"):
        monkeypatch.delenv(f"APPLIANCE_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@dataclass
class Result:
    exit_code: int
    stdout_bytes: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: str, input: str | None = None) -> Result:
    """Run one command in this process and capture its output."""
    out, err = io.BytesIO(), io.StringIO()
    text, before = io.TextIOWrapper(out, "utf-8"), sys.stdin
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(err):
        sys.stdin = io.StringIO(input or "")
        try:
            code = main(list(arguments))
        finally:
            sys.stdin = before
            text.flush()
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def main_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that looks to commands like the main process of the box in the directory `box`."""
    arguments = ["appliance.boot.main", "up", "--config", str(tmp_path / "box" / "config.json")]
    process = subprocess.Popen(["/bin/sh", "-c", "read line", *arguments], stdin=subprocess.PIPE)
    # Wait until the child executes the shell: until then /proc has the arguments of pytest.
    while b"appliance.boot.main" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def write_box_file(data_dir: Path, **fields: Any) -> None:
    data_dir.mkdir(exist_ok=True)
    (data_dir / "box.json").write_text(json.dumps(fields))


@dataclass
class ControlledBox:
    """The real control app in a separate thread; commands find the app by its data directory."""

    data_dir: Path
    app: FastAPI
    context: ControllerContext
    loop: asyncio.AbstractEventLoop

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return run(*arguments, "--data-dir", str(self.data_dir), input=input)

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def do(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread of the app, which uses the database; return the result."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)

    def settle(self) -> None:
        """Wait until all validations of jobs have ended."""
        asyncio.run_coroutine_threadsafe(self.context.tasks.idle("validations"), self.loop).result(60)

    @property
    def job_events(self) -> JobEvents:
        return JobEvents(self.context.db, self.context.files_dir, self.context.config.organization)


@pytest.fixture
def box(tmp_path: Path, main_process: subprocess.Popen[bytes]) -> Iterator[ControlledBox]:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    socket_path = data_dir / "controller.sock"
    ready: list[Any] = []
    started = threading.Event()

    def serve() -> None:
        async def main() -> None:
            with Database(data_dir / "appliance.db") as db:
                insert_model(db, "starter", versions=("v1", "v2"))
                context = simulated_context(data_dir, db)
                made = create_app(context)
                server = uvicorn.Server(uvicorn.Config(Listener(made), log_config=None, access_log=False))
                server.capture_signals = contextlib.nullcontext
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(socket_path))
                listener.listen()
                ready.extend([made, context, asyncio.get_running_loop(), server])
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                while not server.started:
                    await asyncio.sleep(0.005)
                started.set()
                await serving

        asyncio.run(main())

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(60)
    made, context, loop, server = ready
    served = {"url": "http://127.0.0.1:9", "controller_socket": str(socket_path)}
    write_box_file(data_dir, pid=main_process.pid, state="ready", message="ready", **served)
    yield ControlledBox(data_dir, made, context, loop)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


Answer = tuple[int, Any]


@dataclass
class PreparedBox:
    """A server on TCP and on a Unix socket with answers that the test prepares.

    answers: (method, path without query) -> answers in order; the last answer repeats. An answer is (status, body): a
    JSON value, raw bytes, or a function of the request's JSON.
    """

    url: str
    socket_path: Path
    answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def prepare(self, method: str, path: str, *answers: Answer) -> None:
        self.answers[method, path] = list(answers)

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return run(*arguments, "--url", self.url, input=input)

    def sent(self, method: str, path: str) -> list[dict[str, Any]]:
        return [r for r in self.requests if (r["method"], r["path"]) == (method, path)]

    def answer(self, method: str, path: str) -> Answer:
        prepared = self.answers.get((method, path))
        if prepared is None:
            return 404, openai_error(f"no answer prepared for {method} {path}", "unknown_url")
        return prepared.pop(0) if len(prepared) > 1 else prepared[0]


def openai_error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[PreparedBox]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            path, _, query = self.path.partition("?")
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            prepared_box.requests.append(
                {
                    "method": self.command,
                    "path": path,
                    "query": query,
                    "headers": dict(self.headers),
                    "content": content,
                }
            )
            status, body = prepared_box.answer(self.command, path)
            if callable(body):
                body = body(json.loads(content) if content else None)
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: Any) -> None:
            return

    class SocketServer(ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)

    socket_path = tmp_path / "prepared.sock"
    tcp, unix = ThreadingHTTPServer(("127.0.0.1", 0), Handler), SocketServer(str(socket_path), Handler)
    prepared_box = PreparedBox(f"http://127.0.0.1:{tcp.server_address[1]}", socket_path)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in (tcp, unix)]
    for thread in threads:
        thread.start()
    yield prepared_box
    for server, thread in zip((tcp, unix), threads, strict=True):
        server.shutdown()
        thread.join(10)
        server.server_close()
