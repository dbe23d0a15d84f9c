"""What the gateway costs: requests/s, added latency and CPU per request and per relayed chunk, beside its peers.

    python benchmarks/gateway_relay.py [--seconds 2] [--rounds 3] [--json FILE] [--vllm-router BIN] [--litellm BIN]

One upstream (canned answers) is asked directly, through nginx as a reverse proxy (if installed) and through the gateway
with everything on: key, checks, routing, holds, metrics, access log; both reach it by a Unix socket. vLLM's router and
LiteLLM's proxy take part if their commands are given (each from an environment of its own: `python -m venv R &&
R/bin/pip install vllm-router`, `'litellm[proxy]'`); they reach the upstream by TCP, all they can. The proxy under test
has a core of its own; load generator and upstream share the rest. CPU per request is read from /proc, so it holds even
where the load generator is the bottleneck; `rps/core` is its inverse. Streams: "burst" sends 64 events as fast as they
go; "paced" sends one event every 10 ms on each of 64 streams, as engines do, and shows the cost of one relayed event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._claims import Claim, at_least, at_most, record, skipped  # noqa: E402 - the path comes first

# (mode, peer, least ratio of requests per core-second): at most twice vllm-router's CPU, twenty times LiteLLM's rate.
AIMS = (("plain", "vllm-router", 0.5), ("plain", "litellm", 20.0))
MAX_ADDED_P50_MS = 1.5
KEY = "sk-benchmark"
EVENTS = 64
PACE_S = 0.010
STREAM_END = b"0\r\n\r\n"
ANSWER_END = b'"end":1}'
CONCURRENCY = (1, 16, 64, 256)

_CONTENT = "x" * 860
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": _CONTENT}, "finish_reason": "stop"}],
        "end": 1,
    },
    separators=(",", ":"),
).encode()
EVENT = (
    b"data: "
    + json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "model": "m",
            "choices": [{"delta": {"content": " word"}}],
        }
    ).encode()
    + b"\n\n"
)
EVENT_CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"data: [DONE]\n\n"
LAST = b"%x\r\n%b\r\n" % (len(DONE), DONE) + STREAM_END


def request_body(mode: str) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "y" * 900}], "user": mode}
    return json.dumps({**body, "stream": mode != "plain"}, separators=(",", ":")).encode()


def request_bytes(mode: str) -> bytes:
    body = request_body(mode)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# -- the upstream


class Upstream(asyncio.Protocol):
    """Answers each request with canned bytes; knows no HTTP beyond the length of a body."""

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
        # A question without a body is a router's, whether the upstream is well.
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
    """Asks again as soon as an answer is complete."""

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


async def own_load(port: int, mode: str, concurrency: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    started = time.perf_counter()
    finished = []
    for _ in range(concurrency):
        done = loop.create_future()
        finished.append(done)
        await loop.create_connection(
            lambda done=done: Client(mode, started + seconds, latencies, done), "127.0.0.1", port
        )
    await asyncio.gather(*finished)
    took = time.perf_counter() - started
    latencies.sort()
    return {
        "requests": len(latencies),
        "rps": len(latencies) / took,
        "p50_us": statistics.median(latencies) * 1e6,
        "p99_us": latencies[int(len(latencies) * 0.99)] * 1e6,
    }


# -- the proxies under test


def cpu_s(pids: list[int]) -> float:
    """Time on a core, from the scheduler's own nanosecond account: /proc/PID/stat only samples at each tick."""
    nanoseconds = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(process for row in children for child in row for process in tree(int(child)))]


NGINX_CONFIG = """
{user} daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 4096; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 100000000; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server unix:{socket}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def pinned(command: list[str], cores: set[int], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def push_table(bus_socket: str, engine_socket: str) -> asyncio.Server:
    """The controller's end of the bus: one table for whoever connects."""
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


async def answering(name: str, port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, RuntimeError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("plain"))
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{name} does not answer on port {port}")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LITELLM_CONFIG = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false}}
"""


def others(folder: Path, upstream: int, ports: dict[str, int], commands: dict[str, str]) -> dict[str, list[str]]:
    """The command that starts each other peer, by name."""
    found = {}
    if "vllm-router" in commands:
        found["vllm-router"] = [
            commands["vllm-router"],
            "--host",
            "127.0.0.1",
            "--port",
            str(ports["vllm-router"]),
            "--worker-urls",
            f"http://127.0.0.1:{upstream}",
            "--prometheus-port",
            str(free_port()),
            "--log-level",
            "error",
        ]
    if "litellm" in commands:
        (folder / "litellm.yaml").write_text(LITELLM_CONFIG.format(upstream=upstream, key=KEY))
        found["litellm"] = [
            commands["litellm"],
            "--config",
            str(folder / "litellm.yaml"),
            "--host",
            "127.0.0.1",
            "--port",
            str(ports["litellm"]),
        ]
    return found


async def measure(
    seconds: float, repeats: int, concurrencies: tuple[int, ...], commands: dict[str, str]
) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own_core, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    os.sched_setaffinity(0, rest)
    results: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="gwb-", dir="/tmp"))
    engine, bus = str(folder / "e.sock"), str(folder / "bus.sock")
    ports = {name: free_port() for name in ("direct", "nginx", "gateway", *commands)}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        upstream = stack.enter_context(
            pinned([sys.executable, __file__, "--upstream", engine, str(ports["direct"])], rest)
        )
        pids = {"direct": upstream.pid}
        nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if nginx:
            (folder / "nginx.conf").write_text(
                NGINX_CONFIG.format(
                    # Started by root, its worker would change user and could not reach the socket.
                    user="user root;" if os.geteuid() == 0 else "",
                    folder=folder,
                    socket=engine,
                    port=ports["nginx"],
                )
            )
            pids["nginx"] = stack.enter_context(pinned([nginx, "-c", str(folder / "nginx.conf")], own_core)).pid
        else:
            print("nginx is not installed: left out (apt-get install nginx-light)", file=sys.stderr)
        server = await push_table(bus, engine)
        gateways = {"gateway": (Path(__file__).parents[1], sys.executable)}
        if before := commands.pop("before", None):
            gateways["before"] = (Path(before), str(Path(before).absolute() / ".venv/bin/python"))
        for name, (project, python) in gateways.items():
            config = {
                "controller_socket": str(folder / "c.sock"),
                "bus_socket": bus,
                "port": ports[name],
                "log_path": str(folder / f"{name}.access.log"),
            }
            config_file = folder / f"{name}.json"
            config_file.write_text(json.dumps(config))
            pids[name] = stack.enter_context(
                pinned(
                    [python, "-m", "appliance.gateway.main", "--config", str(config_file)],
                    own_core,
                    cwd=project,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            ).pid
        for name, command in others(folder, ports["direct"], ports, commands).items():
            environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            pids[name] = stack.enter_context(
                pinned(command, own_core, stdout=log, stderr=log, env=environment, cwd=folder)
            ).pid
        for name in list(pids):
            try:
                await answering(name, ports[name])
            except RuntimeError as error:
                if name not in commands:
                    raise
                print(f"{error}: left out\n{(folder / f'{name}.log').read_text()[-2000:]}", file=sys.stderr)
                del pids[name]
        cases = [(mode, c) for mode in ("plain", "burst") for c in concurrencies] + [("paced", 64)]
        for mode, concurrency in cases:
            direct: dict[str, Any] = {}
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in pids}
            for _ in range(repeats):
                for name, pid in list(pids.items()):
                    family = tree(pid)
                    before = cpu_s(family)
                    at_least_s = 3.0 if mode == "paced" or name == "litellm" else 0.0
                    row: dict[str, Any] = await own_load(ports[name], mode, concurrency, max(seconds, at_least_s))
                    row["cpu_us"] = (cpu_s(family) - before) / max(1, row["requests"]) * 1e6
                    rounds[name].append(row)
            for name, rows in rounds.items():
                # Whatever else runs on the machine only ever adds: the best round is the nearest to the truth.
                row = {key: min(r[key] for r in rows) for key in ("p50_us", "p99_us")}
                row["rps"] = max(r["rps"] for r in rows)
                row["requests"] = sum(r["requests"] for r in rows)
                used = min(r["cpu_us"] for r in rows)
                if name == "gateway" and "before" in rounds:
                    _print_pairs(rows, rounds["before"])
                row |= {"peer": name, "mode": mode, "concurrency": concurrency}
                if name == "direct":
                    direct = row
                else:
                    row["cpu_us_per_request"] = used
                    row["rps_per_core"] = 1e6 / used if used else None
                    row["added_p50_us"] = row["p50_us"] - direct["p50_us"]
                    row["added_p99_us"] = row["p99_us"] - direct["p99_us"]
                    if mode != "plain":
                        row["cpu_us_per_event"] = used / EVENTS
                results.append(row)
                print(_line(row), flush=True)
        server.close()
    return {
        "benchmark": "gateway_relay",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": len(cores), "cpu": _cpu_name(), "python": platform.python_version()},
        "seconds": seconds,
        "rounds": repeats,
        "results": results,
        "ratios": _ratios(results),
    }


def _print_pairs(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """The median of the ratios within each round: what else the machine does falls on both of a pair."""
    for key, what in (("cpu_us", "CPU"), ("p50_us", "p50")):
        ratio = statistics.median(a[key] / b[key] for a, b in zip(now, before, strict=True))
        print(f"    {what} of a request, now over before, median of {len(now)} pairs: {ratio:.3f}")


def _ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Gateway over each peer, by mode: requests per core-second, and CPU per event of paced streams."""
    best: dict[tuple[str, str], float] = {}
    for row in results:
        if row["peer"] != "direct" and row["rps_per_core"]:
            key = (row["peer"], row["mode"])
            best[key] = max(best.get(key, 0.0), row["rps_per_core"])
    return {
        f"{mode}_rps_per_core_over_{peer}": round(best["gateway", mode] / best[peer, mode], 3)
        for peer, mode in best
        if peer != "gateway" and ("gateway", mode) in best
    }


def _claims(ratios: dict[str, float], added_p50_ms: float) -> list[Claim]:
    rows = [at_most("gateway: added p50 of a request", "plain, one connection", added_p50_ms, "ms", MAX_ADDED_P50_MS)]
    for mode, peer, least in AIMS:
        value, claim = ratios.get(f"{mode}_rps_per_core_over_{peer}"), f"gateway: requests per core-second over {peer}"
        absent = skipped(claim, mode, f">= {least:g}", f"no {peer} (see --help)")
        rows.append(absent if value is None else at_least(claim, mode, value, "x", least))
    return rows


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['mode']:6} c={row['concurrency']:<3} {row['peer']:8} {row['rps']:9.0f} req/s  "
        f"p50 {row['p50_us']:8.0f} µs  p99 {row['p99_us']:8.0f} µs"
    )
    if row["peer"] != "direct":
        text += f"  added p50 {row['added_p50_us']:7.0f} µs  CPU {row['cpu_us_per_request']:7.1f} µs/req"
        if "cpu_us_per_event" in row:
            text += f"  {row['cpu_us_per_event']:5.1f} µs/event"
    return text


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return platform.processor()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time per case, peer and round")
    parser.add_argument("--rounds", type=int, default=3, help="peers take turns so often; the best of each counts")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    for peer in ("vllm-router", "litellm"):
        parser.add_argument(f"--{peer}", metavar="BIN", help=f"the command `{peer}` of an environment that has it")
    parser.add_argument("--before", metavar="DIR", help="another checkout, with its .venv: its gateway takes turns")
    parser.add_argument("--json", metavar="FILE", help="write the results there ('-': standard output)")
    parser.add_argument("--upstream", nargs=2, metavar=("SOCKET", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.upstream:
        with contextlib.suppress(KeyboardInterrupt):  # of a Ctrl-C: `pinned` ends it
            uvloop.run(run_upstream(arguments.upstream[0], int(arguments.upstream[1])))
        return
    commands = {"vllm-router": arguments.vllm_router, "litellm": arguments.litellm, "before": arguments.before}
    commands = {name: command for name, command in commands.items() if command}
    result = uvloop.run(measure(arguments.seconds, arguments.rounds, tuple(arguments.concurrency), commands))
    for name, value in result["ratios"].items():
        print(f"{name}: {value}")
    alone = min(
        (row for row in result["results"] if (row["peer"], row["mode"]) == ("gateway", "plain")),
        key=lambda row: row["concurrency"],
    )
    record(__file__, _claims(result["ratios"], alone["added_p50_us"] / 1e3))
    if arguments.json:
        text = json.dumps(result, indent=2) + "\n"
        sys.stdout.write(text) if arguments.json == "-" else Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
