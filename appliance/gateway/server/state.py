"""State of one gateway process that every handler may use; it needs no locks, because all runs on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import aiohttp
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from uvicorn.server import ServerState
from yarl import URL

from appliance.gateway.core import errors
from appliance.gateway.core.config import GatewayConfig, Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.router import Choice, Holds, Router
from appliance.gateway.core.spending import UsageLimits
from appliance.gateway.core.table import NOBODY, OPEN, Caller, Login, Model
from appliance.gateway.server.certificates import Certificate
from appliance.gateway.server.exchange import Exchange
from appliance.gateway.server.metrics import Comparison, Metrics, access_line
from runtime.background_tasks import BackgroundTasks
from runtime.network import mutual_tls, watched_socket
from weights.format.names import policy_of

if TYPE_CHECKING:
    from appliance.gateway.server.tracing import Tracing

# Engines keep idle connections for an hour; closing ours first avoids a request on a connection that is closing.
_KEEPALIVE_S: Final = 5.0
_CONNECT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_READ_BYTES: Final = 256 * 1024
_LINES: Final[dict[str, Any]] = {"max_line_size": 32 * 1024, "max_field_size": 32 * 1024}
_HEALTH_S: Final = 2.0


class State:
    """State of one process. report_now: sends a load report at once. generation: generation of the current table, -1
    before the first. buffered_bytes: request bodies in memory. token: authenticates the gateway to the controller.
    sessions: logins of the page by the SHA-256 of their tokens. box_troubles: failing parts of the box in the last
    table. access_lines: log lines that the sweep will write."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.limits: Limits = config.limits
        self.report_now: Callable[[], None] = lambda: None
        self.server = ServerState()
        self.connections: set[Any] = self.server.connections
        self.exchanges: set[Exchange] = set()
        self.metrics = Metrics()
        self.comparison = Comparison()
        self.engines = Engines(config.limits.upstream_silence_s)
        self.router = Router(max_inflight=config.limits.replica_inflight)
        self.holds = Holds(config.holds.requests)
        self.access_log: BinaryIO | None = None
        self.access_lines: list[bytes] = []
        if config.access_log and config.log_path is not None:
            self.access_log = open(config.log_path, "ab", buffering=0, opener=partial(os.open, mode=0o600))
        self.tracing: Tracing | None = None
        if config.otlp_endpoint is not None:
            # Imported here: the SDK adds 0.5 s to a start, and most boxes export no traces.
            from appliance.gateway.server import tracing

            self.tracing = tracing.Tracing(config.otlp_endpoint)
        self.token = b"" if config.token_path is None else Path(config.token_path).read_bytes().strip()
        self.keys: dict[str, Caller] = {}
        self.sessions: dict[str, tuple[Login, Caller]] = {}
        self.spending = UsageLimits()
        self.generation = -1
        self.stopping = False
        self.background = BackgroundTasks()
        self.box_troubles: list[str] = []
        self.controller_away = False
        self.certificate: Certificate | None = None
        self.started_s = time.time()
        self.buffered_bytes = 0
        self._id_prefix, self._id_numbers = secrets.token_hex(8).encode(), itertools.count(1)

    def new_request_id(self) -> bytes:
        return b"req_%b%06x" % (self._id_prefix, next(self._id_numbers))

    def take_body(self, exchange: Exchange, nbytes: int) -> None:
        """Count body bytes in memory. Raises HttpError 503 if all bodies together are too large, 429 for those of one
        owner. Class batch may use half of the memory."""
        most = self.limits.buffered_body_bytes // (2 if exchange.use.batch else 1)
        if self.buffered_bytes + nbytes > most:
            text = "The server is busy with other large requests. Please retry."
            raise errors.unavailable(text, "overloaded", 2)
        owner = exchange.use.owner
        if owner.body_bytes + nbytes > self.limits.owner_body_bytes:
            raise self.spending.too_many_at_once("bytes of request bodies", self.limits.owner_body_bytes)
        owner.body_bytes += nbytes
        self.buffered_bytes += nbytes
        exchange.buffered_bytes += nbytes

    # -- models and held requests

    def callable_model(self, name: str, caller: Caller, private: bool = False) -> Model:
        """Return a model that this key may call. private: the caller is the box itself, the only one to call models in
        training. Raises the same HttpError for a forbidden and for a nonexistent model."""
        model = self.router.models.get(name)
        if model is not None and policy_of(name) is None and caller.sees(model) and caller.may_use(name):
            return model
        if model is not None and policy_of(name) is not None and private and caller.may_use(model.trained_from):
            return model
        raise self.unknown_model(name, caller)

    def unknown_model(self, name: str, caller: Caller) -> HttpError:
        """The error for a name that is not in the table, or that this key may not use."""
        base, at, version = name.partition("@")
        model = self.router.models.get(base) if at else None
        if model is None or not caller.sees(model) or not caller.may_use(base):
            message = (
                f"The model `{name[:200]}` does not exist or you do not have access to it; GET /v1/models lists yours."
            )
            return HttpError(404, message, param="model", code="model_not_found")
        served = ", ".join(f"`{each}`" for each in sorted({r.version for r in model.replicas} or {model.version}))
        commands = f"`appliance model rollback {base} --version VERSION`, or `appliance model canary {base} VERSION`"
        message = f"The version `{version[:200]}` of the model `{base}` is not served now; {served} is. See {commands}."
        return HttpError(404, message, param="model", code="model_version_not_served")

    def next_try_s(self, name: str) -> float | None:
        """Seconds until the next start of a model's engines, if requests may not wait that long."""
        model = self.router.models.get(name)
        if model is None or model.trouble is None or any(replica.state == OPEN for replica in model.replicas):
            return None
        left_s = model.trouble.next_try_s - time.time()
        return left_s if left_s > model.trouble.hold_before_s else None

    def not_ready(self, name: str, why: str) -> HttpError:
        """The error for a request that may not wait, or wait longer, for a replica of this model."""
        model, retry_s = self.router.models.get(name), self.config.holds.retry_after_s
        message = f"The model `{name}` is not ready: {why}. Please retry."
        if model is not None and model.trouble is not None:
            retry_s = max(math.ceil(self.next_try_s(name) or retry_s), 1)
            reason = model.trouble.reason.rstrip(".")
            message = f"The model `{name}` is not serving: {reason}. The next try is in {retry_s} s."
        return errors.unavailable(message, "model_not_ready", retry_s)

    def ended(self, choice: Choice) -> None:
        """Free a request's place on its replica and give it to a waiting request."""
        if self.router.end(choice):
            self.report_now()
        if self.holds.queues:
            self.holds.place(self.router, time.monotonic())

    def finished(self, exchange: Exchange, now_s: float) -> None:
        """Charge and log a request whose response is complete or whose client disconnected."""
        use, checked, tokens, status = exchange.use, exchange.checked, exchange.tokens, exchange.status
        self.buffered_bytes -= exchange.buffered_bytes
        use.owner.body_bytes -= exchange.buffered_bytes
        if checked is not None:
            use.under_way -= checked.tokens
            use.owner.requests -= 1
        if checked is not None and use.batch and status == 503:
            use.spend(-1, -checked.tokens)
            checked = None  # it is retried, and counts once, when it is answered
        if exchange.broke_off:
            self.metrics.events["broke_off"] += 1
        self.metrics.finished(exchange, now_s, checked)  # before the next lines replace missing usage by estimates
        if checked is not None:
            if not tokens.completion and exchange.sent_s and status in (200, 401, 499):
                # No usage arrived: the client left, its key was revoked, or the engine died in mid-stream.
                tokens.prompt, tokens.completion = tokens.prompt or checked.prompt_tokens, exchange.stream_events
            use.spend(0, tokens.prompt + tokens.completion - checked.tokens)
            counts = {"prompt_tokens": tokens.prompt, "completion_tokens": tokens.completion}
            counts |= {"requests": 1, "errors": int(status >= 500 or exchange.broke_off)}
            self.spending.count(exchange.caller.id, exchange.model, exchange.model_version, counts)
        elif status == 429 or (exchange.route.kind == "inference" and status in range(400, 499)):
            if exchange.caller is not NOBODY:
                self.spending.count(exchange.caller.id, exchange.model, "", {"refused": 1})
        if self.tracing is not None and exchange.span is not None:
            self.tracing.end(exchange)
        if self.access_log is not None:
            self.access_lines.append(access_line(exchange, now_s))

    def write_access_log(self) -> None:
        """Write the lines since the last call. A full disk loses log lines, never requests."""
        lines, self.access_lines = self.access_lines, []
        if self.access_log is not None and lines:
            with contextlib.suppress(OSError):
                self.access_log.write(b"".join(lines))


class Engines:
    """Connections to engines by address: path of a Unix socket, or https://HOST:PORT on another machine. It uses
    aiohttp's connectors without its sessions, which took a fifth of a request's time. silence_s: longest pause within
    an answer."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._connectors: dict[str, tuple[aiohttp.BaseConnector, aiohttp.ClientRequest]] = {}

    async def connect(self, address: str) -> Connection:
        """Return a connection for one request; the caller must `release` it after a whole answer, else `close` it.
        Raises aiohttp.ClientConnectorError, TimeoutError."""
        if address not in self._connectors:
            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEPALIVE_S}
            connector: aiohttp.BaseConnector
            if address.startswith("/"):
                connector, url = aiohttp.UnixConnector(address, **options), "http://engine"
            else:
                tls = mutual_tls(ssl.PROTOCOL_TLS_CLIENT)
                connector, url = aiohttp.TCPConnector(ssl=tls, socket_factory=watched_socket, **options), address
            self._connectors[address] = connector, aiohttp.ClientRequest("GET", URL(url))
        connector, target = self._connectors[address]
        return await connector.connect(target, [], _CONNECT)

    async def send(
        self, connection: Connection, request: bytes, *, patient: bool = False
    ) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Send a request; return the answer's head and a reader for its body. patient: no limit on pauses. Raises
        aiohttp.SocketTimeoutError, ClientError, OSError, and HttpProcessingError if the answer is not HTTP."""
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None:
            raise aiohttp.ServerDisconnectedError
        silence_s = None if patient else self._silence_s
        protocol.set_response_params(auto_decompress=False, read_timeout=silence_s, read_bufsize=_READ_BYTES, **_LINES)
        transport.write(request)
        protocol.start_timeout()
        return await protocol.read()

    async def is_alive(self, address: str) -> bool:
        """Whether vLLM's health check finds the engine alive; a timeout may mean a busy engine and counts as alive."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                connection = await self.connect(address)
                try:
                    head, _ = await self.send(connection, b"GET /health HTTP/1.1\r\nhost: engine\r\n\r\n")
                    return head.code == 200
                finally:
                    connection.close()
        except TimeoutError:
            return True
        except (aiohttp.ClientError, HttpProcessingError, OSError):
            return False

    async def close(self) -> None:
        for connector, _ in self._connectors.values():
            await connector.close()


async def read_up_to(content: aiohttp.StreamReader, most: int = 64 * 1024) -> bytes:
    """Read a body up to `most` bytes (enough for an error), because a single `read` returns only a part."""
    body = b""
    while len(body) < most and not content.at_eof():
        body += await content.read(most - len(body))
    return body


def gauges(state: State, controller_up: bool) -> Iterator[Metric]:
    """Prometheus series of the current state."""
    held = dict.fromkeys((model for model, _, _ in state.metrics.series), 0) | state.holds.models()
    loads = {name: load.inflight for name, load in state.router.loads.items()}
    failing = dict.fromkeys(state.background.names(), 1)
    expiry = {} if state.certificate is None else {"": state.certificate.expires_s}
    rows: Any = (
        ("gateway_events", "event", "Events of requests, by kind.", state.metrics.events),
        ("gateway_held", "model", "Requests waiting for a replica.", held),
        ("gateway_inflight", "replica", "Requests on a replica.", loads),
        ("gateway_degraded", "part", "1 while a part of the gateway fails and is retried.", failing),
        ("gateway_start_time_seconds", "", "Unix time of the start.", {"": state.started_s}),
        ("gateway_connections", "", "Open client connections.", {"": len(state.connections)}),
        ("gateway_buffered_body_bytes", "", "Request bodies in memory.", {"": state.buffered_bytes}),
        ("tls_expiry_seconds", "", "Unix time at which the endpoint's certificate expires.", expiry),
        ("controller_up", "", "Whether the controller answered this scrape.", {"": int(controller_up)}),
    )
    for name, label, text, values in rows:
        kind = CounterMetricFamily if label == "event" else GaugeMetricFamily
        family = kind(f"appliance_{name}", text, labels=[label] if label else [])
        for value, number in values.items():
            family.add_metric([value] if label else [], number)
        yield family
