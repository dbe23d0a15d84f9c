"""The state of one gateway process and what happens to it: tables in, requests through, reports out.

Everything runs on one event loop thread, so nothing here is locked. Time-driven work of all connections is done
in one sweep a few times a second instead of a timer per request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from appliance.gateway.access.admission import check_head, check_scopes, key_digest
from appliance.gateway.access.request import Headers, Request
from appliance.gateway.access.spending import Spending
from appliance.gateway.control.previous_response import PreviousResponse
from appliance.gateway.control.relay import Relay, WholeRelay
from appliance.gateway.control.scrape import Scrape
from appliance.gateway.core import errors
from appliance.gateway.core.config import GatewayConfig, Limits
from appliance.gateway.core.errors import ApiError
from appliance.gateway.core.routes import Kind
from appliance.gateway.http import wire
from appliance.gateway.http.handler import Handler
from appliance.gateway.http.outbox import Outbox
from appliance.gateway.http.server import ClientConnection
from appliance.gateway.http.upstream import UpstreamPool
from appliance.gateway.inference.handler import InferenceHandler
from appliance.gateway.inference.placement import Placement
from appliance.gateway.inference.response_copies import ResponseCopies
from appliance.gateway.observe.access_log import AccessLog
from appliance.gateway.observe.exposition import WorkerSnapshots
from appliance.gateway.observe.metrics import Metrics
from appliance.gateway.observe.reports import gauges
from appliance.gateway.payload.request_check import Checked, check_object, parsed_body
from appliance.gateway.routing.canary_comparison import Comparison
from appliance.gateway.routing.holds import Bounds, Holds, Refusal
from appliance.gateway.routing.router import Choice, Model, Router
from appliance.gateway.routing.table import Principal, Table
from runtime.background_tasks import BackgroundTasks

if TYPE_CHECKING:
    from appliance.gateway.http.certificates import Certificate
    from appliance.gateway.observe.tracing import Tracing

log = logging.getLogger("appliance.gateway")

_TWO_DIGITS: Final = [b"%02x" % low for low in range(256)]
# Placing thousands of held requests in one go would stall every open stream for as long.
_PLACED_AT_ONCE: Final = 128
# Of the rows that a table should not have had: so many are told one by one.
_SAID: Final = 10


class Gateway:
    """One process's worth. `on_change(urgent)` is called when a load report is due."""

    def __init__(self, config: GatewayConfig, *, on_change: Callable[[bool], None] | None = None) -> None:
        self.config = config
        self.limits: Limits = config.limits
        self.on_change = on_change or (lambda urgent: None)
        self.connections: set[ClientConnection] = set()
        self.metrics = Metrics()
        self.snapshots = WorkerSnapshots(config.bus_socket, config.name) if config.workers > 1 else None
        self.comparison = Comparison()
        self.outbox = Outbox()
        self.pool = UpstreamPool(self.outbox)
        self.copies = ResponseCopies(self)
        self.router = Router(max_inflight=config.limits.replica_inflight)
        holds = config.holds
        self.holds: Holds[Placement] = Holds(Bounds(holds.requests, holds.requests_per_model, holds.body_bytes))
        self.access_log = AccessLog(config.log_path if config.access_log else None)
        self.tracing = None if config.otlp_endpoint is None else _tracing(config.otlp_endpoint, config.name)
        self.token = b"" if config.token_path is None else _token(config.token_path)
        self.keys: dict[str, Principal] = {}
        self.spending = Spending(self.metrics.events, config.workers)
        self.generation = -1
        self.tables_applied = 0
        self.stopping = False
        self.background = BackgroundTasks()
        # What /health says beside "ok": of the rest of the box, as far as the controller has told.
        self.box_troubles: list[str] = []
        self.controller_away = False
        self.refused_rows: tuple[str, ...] = ()
        self.certificate: Certificate | None = None
        self.started_s = time.time()
        self.buffered_bytes = 0
        self._id_prefix = b"req_%b" % secrets.token_hex(8).encode()
        self._id_serial = 0
        self._id_block = b""
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    # -- life

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Accept clients on host:port (0: any port) and return the port."""
        loop = asyncio.get_running_loop()
        # uvloop's, whose `sockets` are a list; asyncio's are a tuple.
        server: Any = await loop.create_server(
            lambda: ClientConnection(self),  # type: ignore[arg-type, return-value]
            host,
            port,
            ssl=self._tls(),
            reuse_port=reuse_port,
            backlog=2048,
        )
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = self.background.keep("sweep", self._sweep_forever)
        return server.sockets[0].getsockname()[1]

    async def close_listeners(self) -> None:
        """Stop accepting; open connections stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def stop(self, deadline_s: float) -> None:
        """Refuse new requests, let those in flight finish for `deadline_s` seconds, then end the rest with an error."""
        self.stopping = True
        await self.close_listeners()
        until = time.monotonic() + deadline_s
        for conn in list(self.connections):
            conn.stop()
        while (self.connections or self.copies.delivering) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for conn in list(self.connections):
            if conn.active is not None:
                conn.active.cancel(errors.unavailable("The server is shutting down.", "shutting_down", 2))
        if self.connections:
            await asyncio.sleep(0.05)
        for conn in list(self.connections):
            conn.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.copies.close()
        self.pool.close()
        self.access_log.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def _tls(self) -> ssl.SSLContext | None:
        config = self.config
        if config.tls_cert_path is None or config.tls_key_path is None:
            return None
        if self.certificate is None:
            # Here and not above: what reads certificates costs a start a tenth of a second, and most need none.
            from appliance.gateway.http.certificates import Certificate

            self.certificate = Certificate(config.tls_cert_path, config.tls_key_path)
        return self.certificate.context

    def reload(self) -> None:
        """What a person changed in files and wants in force now (SIGHUP)."""
        if self.certificate is not None and self.certificate.look(time.monotonic(), at_once=True):
            self.on_change(True)

    # -- the controller's side

    def apply(self, table: Table) -> None:
        """Put a routing table into force at once: revoked keys end here, held requests start here."""
        changed_keys = self.keys != table.keys
        self.keys = dict(table.keys)
        self.tables_applied += 1
        self.spending.apply(table.keys.values())
        known = {f.name: type(getattr(self.config.limits, f.name)) for f in dataclasses.fields(Limits)}
        changed = {name: known[name](value) for name, value in table.limits.items() if name in known}
        limits = dataclasses.replace(self.config.limits, **changed)
        if limits != self.limits:
            self.limits = limits
        self.router.max_inflight = self.limits.replica_inflight
        self.router.apply(table.models)
        self.comparison.apply(table.models)
        self.metrics.forget_models(self.router.models)
        self.generation = table.generation
        if table.refused != self.refused_rows:
            new = [text for text in table.refused if text not in self.refused_rows]
            self.refused_rows = table.refused
            self.metrics.events["table_row_refused"] += len(new)
            for text in new[:_SAID]:
                log.error("bus: a row of the table is skipped, all others are in force: %s", text)
        if changed_keys:
            principals = {principal.id: principal for principal in table.keys.values()}
            for conn in list(self.connections):
                conn.keys_changed(principals)
        for name in self.holds.models():
            self.place_held(name)
            self._refuse_in_trouble(name)
        self.on_change(True)

    def _refuse_in_trouble(self, name: str) -> None:
        """Nobody waits for a model whose engines failed and are not tried again soon, those neither who wait
        already."""
        if self.next_try_s(name) is None:
            return
        while (ticket := self.holds.first(name)) is not None:
            self.holds.remove(ticket)
            ticket.item.hold_refused(Refusal.TROUBLE)

    def next_try_s(self, name: str) -> float | None:
        """In how many seconds the engines of a model are tried again, where that is too far away to wait for."""
        model = self.router.models.get(name)
        trouble = None if model is None else model.trouble
        if model is None or trouble is None or any(replica.state == "open" for replica in model.replicas):
            return None
        left_s = trouble.next_try_s - time.time()
        return left_s if left_s > trouble.hold_before_s else None

    def changed(self) -> None:
        self.on_change(False)

    def held(self, model: str) -> None:
        """A request began to wait. The controller must hear at once: a sleeping model wakes on it."""
        self.on_change(self.holds.held(model) == 1)

    def ended(self, choice: Choice) -> None:
        """A request left its replica."""
        self.on_change(self.router.end(choice))
        if self.holds.count and self.holds.held(choice.model):
            asyncio.get_running_loop().call_soon(self.place_held, choice.model)

    def place_held(self, model: str) -> None:
        """Let waiting requests go for as long as some replica takes them."""
        for _ in range(_PLACED_AT_ONCE):
            ticket = self.holds.first(model)
            if ticket is None:
                return
            ticket.item.place()
            if self.holds.first(model) is ticket:
                return
        asyncio.get_running_loop().call_soon(self.place_held, model)

    def notes(self) -> list[str]:
        """What a person who looks at the box's status should know of this gateway."""
        told = [f"the gateway skips a row of its table: {text}" for text in self.refused_rows[:_SAID]]
        if len(self.refused_rows) > _SAID:
            told.append(f"the gateway skips {len(self.refused_rows) - _SAID} more rows of its table")
        if self.certificate is not None:
            told += self.certificate.notes(time.time())
        return told

    # -- requests

    def new_request_id(self) -> bytes:
        serial = self._id_serial
        self._id_serial = serial + 1
        low = serial & 255
        if not low:
            self._id_block = b"%b%04x" % (self._id_prefix, serial >> 8)
        return b"%b%b" % (self._id_block, _TWO_DIGITS[low])

    def request_id(self, headers: Headers) -> bytes:
        return wire.accepted_request_id(headers) or self.new_request_id()

    def admit(self, request: Request) -> None:
        """Everything that can be said of a request from its head. Raises ApiError."""
        route = request.route
        assert route is not None
        if route.kind is not Kind.HEALTH:
            digest = key_digest(request.headers)
            if self.generation < 0:
                raise errors.unavailable("The gateway has no routing table yet. Please retry.", "starting", 2)
            principal = self.keys.get(digest)
            if principal is None:
                self.metrics.events["bad_key"] += 1
                raise errors.invalid_key()
            request.principal = principal
            request.use = self.spending.use_of(principal)
            check_scopes(route, principal)
        check_head(request, self.limits)

    def take_body(self, request: Request, nbytes: int) -> None:
        """Account for body bytes kept in memory. Raises ApiError 503 when all bodies together are too large."""
        if self.buffered_bytes + nbytes > self.limits.buffered_body_bytes:
            raise errors.unavailable("The server is busy with other large requests. Please retry.", "overloaded", 2)
        use = request.use
        if use is not None:
            if use.body_bytes + nbytes > self.limits.key_body_bytes:
                raise errors.too_many_at_once("bytes of request bodies", self.limits.key_body_bytes)
            use.body_bytes += nbytes
        self.buffered_bytes += nbytes
        request.buffered_bytes += nbytes

    def release_body(self, request: Request) -> None:
        self.buffered_bytes -= request.buffered_bytes
        if request.use is not None:
            request.use.body_bytes -= request.buffered_bytes
        request.buffered_bytes = 0
        if request.chunks:
            request.chunks = []

    def handler(self, client: ClientConnection, request: Request) -> Handler:
        """Who answers this request. Raises ApiError if its body rules it out."""
        route = request.route
        assert route is not None
        headers = request.headers
        if b"traceparent" in headers:
            request.trace = wire.accepted_trace(headers)
        principal, use = request.principal, request.use
        assert principal is not None and use is not None
        if route.kind is not Kind.INFERENCE:
            self.spending.admit_control(principal, use, self.limits)
            self.spending.opened_control(request, principal, use, self.limits)
            return Relay(self, client, request) if route.kind is Kind.CONTROL else Scrape(self, client, request)
        # In the order of what it costs: the key's limits, then what the body holds, the model, and what it asks for.
        self.spending.admit(request, use, self.limits)
        chunks = request.chunks
        if len(chunks) != 1:
            request.chunks = chunks = [b"".join(chunks)]
        data = parsed_body(chunks[0], self.limits)
        name: str = data["model"]
        self.callable_model(name, principal)
        request.refused_model = name.partition("@")[0] if "@" in name else name
        return self.answering(client, request, check_object(route, data, len(chunks[0]), self.limits))

    def answering(self, client: ClientConnection, request: Request, checked: Checked) -> Handler:
        """Who answers this request for inference, whose body is `checked`. Raises ApiError."""
        route = request.route
        assert route is not None
        assert request.principal is not None
        model = self.callable_model(checked.model, request.principal)
        if model.task != route.task:
            raise errors.wrong_task(checked.model, route.name)
        transcript = checked.transcript
        if transcript is not None:
            transcript.stores = transcript.stores and self.config.stores_responses
            if not transcript.has_previous:
                self.take_body(request, len(transcript.input))  # which is here twice until the answer is
            if transcript.background:
                self.spending.spend(request, checked, self.limits)
                self.spending.opened(request, checked)
                return WholeRelay(self, client, request)
            if transcript.previous_id and not transcript.has_previous:
                # The controller's time: a hundred bytes name a conversation of megabytes.
                assert request.use is not None
                self.spending.admit_control(request.principal, request.use, self.limits)
                return PreviousResponse(self, client, request, checked)
        self.spending.spend(request, checked, self.limits)
        self.spending.opened(request, checked)
        # What is counted and logged is about the model; which version it was, the replica says.
        name = checked.model
        request.model = name.partition("@")[0] if "@" in name else name
        self.metrics.arrived(name, checked.prompt_tokens, request.received_s)
        if self.tracing is not None:
            self.tracing.begin(request)
        return InferenceHandler(self, client, request, checked)

    def callable_model(self, name: str, principal: Principal) -> Model:
        """The row of a model that this key may call. Raises ApiError, the same for one that it may not as for one that
        nobody has; so nothing that depends on the model is said before."""
        model = self.router.models.get(name)
        if model is None or not principal.sees(model) or not principal.may_use(name):
            raise self.unknown_model(name, principal)
        return model

    def unknown_model(self, name: str, principal: Principal | None) -> ApiError:
        """Why a name that is not in the table cannot be called."""
        base, at, version = name.partition("@")
        row = self.router.models.get(base) if at else None
        if row is None or principal is None or not principal.sees(row) or not principal.may_use(base):
            return errors.model_not_found(name)
        served = {replica.version for replica in row.replicas} or {row.version}
        return errors.version_not_served(base, version, sorted(served))

    def own_answer(self, request: Request) -> tuple[int, bytes, bytes]:
        """/health: status, content type, body."""
        ready = self.generation >= 0 and not self.stopping
        away = ["controller"] if self.controller_away else []
        degraded = sorted({*self.background.names(), *self.box_troubles, *away})
        told = {"status": "ok" if ready else "starting", "boot": self.config.boot, "degraded": degraded}
        return (200 if ready else 503), b"application/json", orjson.dumps(told)

    def finished(self, request: Request, now_s: float) -> None:
        """A response is complete (or its client is gone)."""
        self.release_body(request)
        if request.counted:
            self.spending.closed(request)
        if request.model:
            self.spending.account(request, now_s)
        elif 400 <= request.status < 500 and request.status != 499 and self._is_refusal(request):
            self.spending.refused(request)
        self.metrics.finished(request, now_s)
        if request.spans is not None:
            request.spans.end()
        if self.access_log.enabled:
            self.access_log.add(request, now_s)

    def _is_refusal(self, request: Request) -> bool:
        """Of an inference route anything that was answered here, of a control route what was over a limit."""
        route = request.route
        if route is None or route.kind is not Kind.INFERENCE:
            return request.status == 429
        return True

    # -- time

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_s)
            self.sweep(time.monotonic())

    def sweep(self, now_s: float) -> None:
        """Deadlines, keep-alive comments, stalled clients, idle upstream connections, the access log."""
        for ticket in self.holds.expired(now_s):
            ticket.item.hold_refused(Refusal.DEADLINE)
        for name in self.holds.models():
            self.place_held(name)
        for conn in list(self.connections):
            try:
                conn.tick(now_s)
            except Exception as error:  # noqa: BLE001 - logged; one connection's bug must not stall all others
                log.error("a connection was cut off: its deadlines could not be looked at", exc_info=error)
                conn.abort()
        wanted = {replica.socket for model in self.router.models.values() for replica in model.replicas}
        wanted.add(self.config.controller_socket)
        self.pool.sweep(now_s, wanted)
        self.copies.sweep(now_s)
        self.access_log.flush()
        if self.certificate is not None and self.certificate.look(now_s):
            self.on_change(True)
        if self.snapshots is not None and self.snapshots.due(now_s):
            self.snapshots.write(self.metrics.families(gauges(self)), now_s)


def _token(path: str) -> bytes:
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise errors.ConfigInvalid(f"token_path {path!r}: cannot be read ({error.strerror})") from error
    if not token.isalnum():
        raise errors.ConfigInvalid(f"token_path {path!r}: expected a file with letters and digits")
    return token


def _tracing(endpoint: str, worker: str) -> Tracing:
    # Here and not above: the SDK costs every start half a second, and most boxes export no traces.
    from appliance.gateway.observe.tracing import Tracing

    return Tracing(endpoint, worker)
