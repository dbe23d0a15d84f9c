"""Measures requests/s, latency, and CPU per request and per relayed event of the gateway and of peers.

    python -m benchmarks.gateway_relay [--seconds 2] [--rounds 3] [--concurrency 1 64 512] [--peer NAME=COMMAND ...]

Requests go to one upstream (canned answers) directly, and through the gateway with all features on: key, checks,
routing, holds, metrics, access log. Gateway and peers take turns. In peer commands, {port} is the port to listen on,
{upstream} the port and {socket} the Unix socket of the upstream, and {config} a gateway configuration with {port}:

    --peer "vllm-router=R/bin/vllm-router --port {port} --worker-urls http://127.0.0.1:{upstream} --log-level error"
    --peer "nginx=benchmarks/nginx.sh {port} {socket}"
    --peer "before=env -C CHECKOUT .venv/bin/python -m appliance.gateway.main --config {config}"

The proxies have one core; load generator and upstream share the rest. CPU per request comes from /proc, so it is valid
even if the load generator is the bottleneck. Streams: "burst" sends 64 events as fast as they go; "paced" sends one
event every 10 ms on each of 64 streams, as engines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks._claims import Claim, at_least, at_most, parser, record, stated
from tests.e2e.box_support import free_port

LEAST_OVER_VLLM_ROUTER = 0.5  # aim for the ratio of requests per core-second
MAX_ADDED_P50_MS = 1.5
GATEWAY = f"{sys.executable} -m appliance.gateway.main --config {{config}}"
KEY = "sk-benchmark"
EVENTS = 64
PACE_S = 0.010
STREAM_END = b"0\r\n\r\n"
ANSWER_END = b'"end":1}'

_MESSAGE = {"role": "assistant", "content": "x" * 860}
_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": _MESSAGE}],
}
_EVENT = {**_ANSWER, "object": "chat.completion.chunk", "choices": [{"delta": {"content": " word"}}]}
ANSWER = json.dumps({**_ANSWER, "end": 1}, separators=(",", ":")).encode()


def chunk(data: str) -> bytes:
    text = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


EVENT_CHUNK = chunk(json.dumps(_EVENT))
LAST = chunk("[DONE]") + STREAM_END


def request_bytes(mode: str) -> bytes:
    asked = {"model": "m", "messages": [{"role": "user", "content": "y" * 900}], "user": mode}
    body = json.dumps({**asked, "stream": mode != "plain"}, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# -- the upstream


class Upstream(asyncio.Protocol):
    """Answers each request with canned bytes; parses no HTTP except the length of a body."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.buffer[:end].lower()
        # A request without a body is a health check by a router.
        length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]) if b"content-length: " in head else 0
        if len(self.buffer) < end + 4 + length:
            return
        body = self.buffer[end + 4 : end + 4 + length]
        self.buffer = b""
        assert self.transport is not None
        if b'"stream":true' not in body:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(ANSWER), ANSWER)
            )
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.next_event(EVENTS, PACE_S if b'"user":"paced"' in body else 0.0)

    def next_event(self, left: int, pace_s: float) -> None:
        if self.transport is None:
            return
        if not left:
            self.transport.write(LAST)
            return
        self.transport.write(EVENT_CHUNK)
        loop = asyncio.get_running_loop()
        if pace_s:
            loop.call_later(pace_s, self.next_event, left - 1, pace_s)
        else:
            loop.call_soon(self.next_event, left - 1, pace_s)


async def run_upstream(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    # uvloop closes a server whose object is dropped.
    servers = [
        await loop.create_unix_server(Upstream, path, backlog=1024),
        await loop.create_server(Upstream, "127.0.0.1", port, backlog=1024),
    ]
    await asyncio.Event().wait()
    del servers


# -- the load


class Client(asyncio.Protocol):
    """A connection that sends the next request as soon as an answer is complete."""

    def __init__(self, mode: str, until_s: float, latencies: list[float], done: asyncio.Future[None]) -> None:
        self.data = request_bytes(mode)
        self.end = ANSWER_END if mode == "plain" else STREAM_END
        self.until_s, self.latencies, self.done = until_s, latencies, done
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.ask()

    def ask(self) -> None:
        self.started_s = time.perf_counter()
        self.transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-len(self.end) :] if len(data) < len(self.end) else data[-len(self.end) :]
        if self.tail == self.end:
            now = time.perf_counter()
            self.latencies.append(now - self.started_s)
            if now < self.until_s:
                self.ask()
            elif not self.done.done():
                self.done.set_result(None)
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("a proxy under test closed a connection"))


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one peer under one load: requests per second, latencies, and the peer's CPU seconds per request."""

    rps: float
    p50_s: float
    p99_s: float
    cpu_s: float


async def load(pid: int, port: int, mode: str, concurrency: int, seconds: float) -> Round:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    family = tree(pid)
    cpu_before_s, began_s, finished = cpu_s(family), time.perf_counter(), []
    for _ in range(concurrency):
        finished.append(done := loop.create_future())
        client = Client(mode, began_s + seconds, latencies, done)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
    await asyncio.gather(*finished)
    took_s, count = time.perf_counter() - began_s, len(latencies)
    latencies.sort()
    spent_s = (cpu_s(family) - cpu_before_s) / count
    return Round(count / took_s, statistics.median(latencies), latencies[int(count * 0.99)], spent_s)


# -- the proxies under test


def cpu_s(pids: list[int]) -> float:
    """Return CPU seconds by the kernel scheduler's nanosecond counter: /proc/PID/stat only samples at each tick."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def tree(pid: int) -> list[int]:
    """Return the pids of a process and all its descendants."""
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(process for row in children for child in row for process in tree(int(child)))]


@contextlib.contextmanager
def pinned(command: list[str], cores: set[int], log: Path) -> Iterator[int]:
    """Run a command on these cores; yields its pid and terminates it at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), stdout=out, stderr=out)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


async def push_table(bus_socket: str, engine_socket: str) -> asyncio.Server:
    """Act as the controller's end of the bus: send one routing table to each client."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    replica = {"id": "r", "socket": engine_socket, "version": "v1", "state": "open"}
    table = {
        "type": "table",
        "generation": 1,
        "models": {"m": {"version": "v1", "state": "ready", "task": "generate", "replicas": [replica]}},
        "keys": {digest: {"id": "k", "name": "k", "scopes": ["inference"]}},
        "limits": {},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(table).encode() + b"\n")
        while await reader.readline():
            pass

    return await asyncio.start_unix_server(serve, bus_socket)


async def answering(name: str, port: int, log: Path) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("plain"))
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(0.05)
    raise SystemExit(f"{name} does not answer on port {port}:\n{log.read_text()[-2000:]}")


async def measure(seconds: float, repeats: int, concurrencies: list[int], commands: dict[str, str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    own_core, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    os.sched_setaffinity(0, rest)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gwb-")))
        socket, bus, upstream = str(folder / "e.sock"), str(folder / "bus.sock"), free_port()
        serving = [sys.executable, "-m", "benchmarks.gateway_relay", "--upstream", socket, str(upstream)]
        peers = {"direct": (stack.enter_context(pinned(serving, rest, folder / "direct.log")), upstream)}
        server = await push_table(bus, socket)
        for name, template in {"gateway": GATEWAY, **commands}.items():
            port, config, log = free_port(), folder / f"{name}.json", folder / f"{name}.log"
            places = {"controller_socket": str(folder / "c.sock"), "bus_socket": bus}
            config.write_text(json.dumps({**places, "port": port, "log_path": str(folder / f"{name}.access.log")}))
            values = {"port": port, "upstream": upstream, "socket": socket, "config": config}
            command = [word.format_map(values) for word in shlex.split(template)]
            peers[name] = (stack.enter_context(pinned(command, own_core, log)), port)
        for name, (_, port) in peers.items():
            await answering(name, port, folder / f"{name}.log")
        for mode, concurrency in [(mode, c) for mode in ("plain", "burst") for c in concurrencies] + [("paced", 64)]:
            rounds: dict[str, list[Round]] = {name: [] for name in peers}
            for _ in range(repeats):
                for name, (pid, port) in peers.items():
                    rounds[name].append(await load(pid, port, mode, concurrency, seconds))
            for name, rows in rounds.items():
                print(line(name, mode, concurrency, rows), flush=True)
            record(__file__, claims(mode, concurrency, rounds))
        server.close()


def line(name: str, mode: str, concurrency: int, rows: list[Round]) -> str:
    """Return one row of the table, with the best value of each figure, because other load only makes figures worse."""
    rps, cpu_us = max(row.rps for row in rows), 1e6 * min(row.cpu_s for row in rows)
    p50_us, p99_us = 1e6 * min(row.p50_s for row in rows), 1e6 * min(row.p99_s for row in rows)
    cpu = f"{cpu_us:7.1f} µs/request" if mode == "plain" else f"{cpu_us / EVENTS:5.1f} µs/event"
    return f"{mode:6} c={concurrency:<3} {name:12} {rps:9.0f} req/s  p50 {p50_us:8.0f}  p99 {p99_us:8.0f} µs  CPU {cpu}"


def claims(mode: str, concurrency: int, rounds: dict[str, list[Round]]) -> list[Claim]:
    """Return the medians of each round's CPU ratios, as other load affects both of their sides, and the added p50."""
    found, size, ours = [], f"{mode}, {concurrency} at once", rounds["gateway"]
    for name in rounds.keys() - {"gateway", "direct"}:
        ratio = statistics.median(a.cpu_s / b.cpu_s for a, b in zip(rounds[name], ours, strict=True))
        row = f"gateway: requests per core-second over {name}", size, ratio, "x"
        found.append(at_least(*row, LEAST_OVER_VLLM_ROUTER) if name == "vllm-router" else stated(*row))
    added_ms = 1e3 * (min(row.p50_s for row in ours) - min(row.p50_s for row in rounds["direct"]))
    row = "gateway: added p50 of a request", size, added_ms, "ms"
    return [*found, at_most(*row, MAX_ADDED_P50_MS) if (mode, concurrency) == ("plain", 1) else stated(*row)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=2.0, help="measured time per case, peer and round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 512])
    options.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    options.add_argument("--upstream", nargs=2, metavar=("SOCKET", "PORT"), help="only serve canned answers there")
    given = options.parse_args()
    if given.upstream:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C also reaches the upstream; `pinned` ends it
            uvloop.run(run_upstream(given.upstream[0], int(given.upstream[1])))
        return
    peers = dict(peer.split("=", 1) for peer in given.peer)
    uvloop.run(measure(given.seconds, given.rounds, given.concurrency, peers))


if __name__ == "__main__":
    main()
