"""Runs the gateway process: `python -m appliance.gateway.main --config FILE`.

The bus is JSON lines over the controller's Unix socket: routing tables in, load reports out. On each connection the
controller first sends a whole table. Each report has the generation of the applied table. Usage is sent again until the
controller confirms it. While the controller is unreachable, the last table stays in force."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvloop
from uvicorn import Config

from appliance.gateway.core import errors
from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.core.errors import ConfigInvalid, HttpError
from appliance.gateway.core.routes import ROTATION, SESSIONS
from appliance.gateway.core.table import Table, read_table
from appliance.gateway.server.app import App
from appliance.gateway.server.certificates import Certificate
from appliance.gateway.server.controller import Controller
from appliance.gateway.server.exchange import Connection, Exchange
from appliance.gateway.server.metrics import ModelLoad
from appliance.gateway.server.state import State
from appliance.ui.site import site
from runtime.logs import configure_logging, timestamp
from runtime.network import private_socket
from runtime.processes.kernel import DiesAs, dies_as, settle_garbage

log = logging.getLogger("appliance.gateway")

# Listeners on one port: libuv 1.45 and later accepts only one client per listener and loop turn, too slow for bursts.
_ACCEPTED_AT_ONCE = 8
_BACKLOG = 2048  # clients that wait in the kernel for `accept`; a further client retries after a second
_LAST_WORDS_S = 1.0  # the stopping gateway has this long to send error responses
LINE_BYTES = 64 * 1024 * 1024
RECONNECT_S = 0.2
HEARTBEAT_S = 5.0
COUNTED = b'{"type":"counted"}\n'  # the controller's reply to a usage message


class Gateway:
    """One gateway process: its listeners, its bus connection and its shutdown. state: shared by all requests."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config, self.state = config, State(config)
        self.controller = Controller(self.state)
        self._servers: list[asyncio.Server] = []
        self._bus: asyncio.StreamWriter | None = None
        self._sent, self._sent_s = b"", 0.0  # the last report that was sent, and when
        self._usage: list[dict[str, Any]] = []  # rows that the controller has not counted yet
        self._usage_sent = False  # whether `_usage` was sent on this connection

    async def listen(self, host: str, port: int, private: socket.socket | None = None) -> int:
        """Listen on host:port (port 0: any free port) and return the port.

        private: a listening Unix socket of mode 0600 for requests that name a key by its id (see `App`)."""
        config, state, loop = self.config, self.state, asyncio.get_running_loop()
        app: Any = App(state, self.controller)
        served = Config(app, interface="asgi3", ws="none", log_config=None, proxy_headers=False)
        served.load()
        options: dict[str, Any] = {"backlog": _BACKLOG}
        if config.tls_cert_path is not None and config.tls_key_path is not None:
            state.certificate = Certificate(config.tls_cert_path, config.tls_key_path)
            options |= {"ssl": state.certificate.context, "ssl_handshake_timeout": config.limits.head_timeout_s}
        connection = partial(Connection, served, state.server, state)
        server = await loop.create_server(connection, host, port, **options)
        self._servers.append(server)
        for listener in server.sockets:
            for _ in range(_ACCEPTED_AT_ONCE - 1):
                self._servers.append(await loop.create_server(connection, sock=listener.dup(), **options))
        if private is not None:
            connection = partial(connection, private=True)
            self._servers.append(await loop.create_unix_server(connection, sock=private, backlog=_BACKLOG))
        state.background.keep("copies", self.controller.send_copies)
        state.background.keep_every("sweep", self.sweep, config.sweep_s)
        return server.sockets[0].getsockname()[1]

    async def stop(self, deadline_s: float) -> None:
        """Refuse new requests, wait up to `deadline_s` seconds for requests in flight, then end them with an error."""
        state = self.state
        state.stopping = True
        for server in self._servers:
            server.close()  # ends listening; open connections stay
        for connection in list(state.connections):
            connection.shutdown()
        await self._idle(deadline_s)
        for exchange in list(state.exchanges):
            exchange.end(errors.unavailable("The server is shutting down.", "shutting_down", 2))
        await self._idle(_LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.abort()
        state.report_now()
        await state.background.stop()
        if lost := self.controller.copies:
            log.warning("%d responses were answered but not stored: the controller is unreachable", lost)
        await state.engines.close()
        await self.controller.session.close()
        if state.access_log is not None:
            state.write_access_log()
            state.access_log.close()
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)

    async def _idle(self, longest_s: float) -> None:
        """Wait until all answers and all copies for the controller are sent, at most `longest_s` seconds."""
        state, until_s = self.state, time.monotonic() + longest_s
        while time.monotonic() < until_s:
            unread = any(connection.transport.get_write_buffer_size() for connection in state.connections)
            if not (unread or state.exchanges or self.controller.delivering):
                return
            await asyncio.sleep(0.02)

    def apply(self, table: Table) -> None:
        """Apply a routing table at once. End requests of revoked keys, refuse held requests that their keys no longer
        allow, and start other held requests."""
        state = self.state
        callers = table.keys.values()
        state.keys, state.box_troubles = table.keys, table.degraded
        state.sessions = {token: (login, key) for key in callers for token, login in key.sessions.items()}
        state.spending.apply(callers)
        state.router.apply(table.models.values())
        state.comparison.apply(table.models.values())
        for gone in state.metrics.loads.keys() - state.router.models.keys():
            del state.metrics.loads[gone]
        state.generation = table.generation
        for exchange in list(state.exchanges):
            if (refusal := self._revoked(exchange)) is not None:
                state.metrics.events["revoked_in_flight"] += 1
                exchange.end(refusal)
            choice, ticket = exchange.choice, exchange.ticket
            if ticket is not None and ticket.place.done() and ticket.place.exception() is None:
                choice = ticket.place.result()  # the request has a place, but its coroutine has not run yet
            if choice is not None and choice.work.batch and not state.router.is_open(choice):
                # The replica of this batch request is draining; the sender retries.
                text = "This request of class batch ended because its engine is stopping. Please retry."
                exchange.end(errors.unavailable(text, errors.GIVES_WAY, 1))
            if ticket is None:
                continue
            try:  # refuse if the key lost the model, the model is gone, or its engines do not start
                state.callable_model(ticket.model, exchange.caller, exchange.connection.private)
                if state.next_try_s(ticket.model) is not None:
                    raise state.not_ready(ticket.model, "its engines do not start")
            except HttpError as error:
                state.holds.refuse(ticket, error)
        state.holds.place(state.router, time.monotonic())
        state.report_now()

    def _revoked(self, exchange: Exchange) -> HttpError | None:
        """Return the error for a request whose key, secret or login is no longer valid; None if all are valid."""
        admitted, session = exchange.caller, exchange.session
        caller = self.state.spending.callers.get(admitted.id)
        if not admitted.id or (exchange.route in (ROTATION, SESSIONS) and exchange.body_complete):
            return None  # a request of the box, or a request that itself replaces its key or ends its login
        if caller is not None and caller.has_expired(time.time()):
            return errors.key_ended(caller.expires_s)
        by_key = not session and not exchange.connection.private  # the box's own requests survive a key rotation
        if caller is None or (by_key and caller.secret != admitted.secret):
            return errors.key_ended(admitted.expires_s)
        if session and session not in {login.id for login in caller.sessions.values()}:
            return errors.session_ended()
        exchange.caller = caller
        return None

    async def sweep(self) -> None:
        """Write the access log, retry held requests, end late connections and reload a changed certificate."""
        state, now_s = self.state, time.monotonic()
        state.write_access_log()
        state.holds.place(state.router, now_s)
        for connection in list(state.connections):
            connection.end_if_late(now_s)
        if state.certificate is not None:
            state.certificate.reload_changed()

    # -- the bus

    async def run_bus(self) -> None:
        """Keep one connection to the controller until cancelled."""
        state = self.state
        state.report_now = self._report
        while True:
            try:
                reader, self._bus = await asyncio.open_unix_connection(state.config.bus_socket, limit=LINE_BYTES)
                self._usage_sent, self._sent, state.controller_away = False, b"", False
                state.metrics.forget_arrivals()  # all arrivals during the outage would look like one burst
                await self._read(reader)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                if not state.controller_away:
                    log.warning("bus: the controller is unreachable, the last table stays in force: %s", error)
            finally:
                state.controller_away = True
                if self._bus is not None:
                    self._bus.close()
                    self._bus = None
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Apply tables and send due reports until the connection ends. Raises ValueError on a line that is too long or
        is not JSON."""
        while True:
            try:
                async with asyncio.timeout(self.config.report_s):
                    line = await reader.readline()
            except TimeoutError:
                self._report()
                continue
            if not line:
                return
            if line == COUNTED:
                self._usage = []
                continue
            try:
                # Parsed in a thread: a table may have thousands of models. Meanwhile the last table stays in force.
                self.apply(await asyncio.to_thread(read_table, line))
            except msgspec.ValidationError as error:
                log.error("bus: ignored an invalid table, the last table stays in force: %s", error)

    def _report(self) -> None:
        """Send a report if it changed or the heartbeat is due; drop a connection that the controller does not read."""
        writer, state = self._bus, self.state
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > LINE_BYTES // 64:
            writer.transport.abort()  # the controller does not read the connection
            return
        report = orjson.dumps(load_report(state), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        if report != self._sent or time.monotonic() - self._sent_s >= HEARTBEAT_S:
            self._sent, self._sent_s = report, time.monotonic()
            writer.write(report)
            state.metrics.forget_arrivals()
        if not self._usage:
            self._usage, self._usage_sent = state.spending.take_sums(), False
        if self._usage and not self._usage_sent:
            writer.write(orjson.dumps({"type": "usage", "rows": self._usage}, option=orjson.OPT_APPEND_NEWLINE))
            self._usage_sent = True


def load_report(state: State) -> dict[str, Any]:
    """Build the load report for the bus. Times are Unix seconds or durations in seconds.

    The report omits models without a request since this process started. prompt_tokens: prompt tokens of all requests
    in flight or held; waiting_prompt_tokens: those of streams without a first token. replicas: requests in flight."""
    now_s, held, certificate = time.time(), state.holds.models(), state.certificate
    inflight, waiting, prompts = Counter[str](), Counter[str](), Counter[str]()
    for exchange in state.exchanges:
        checked, choice, model = exchange.checked, exchange.choice, exchange.routed_model
        if checked is None or exchange.use.batch:
            continue
        inflight[model] += 1
        prompts[model] += checked.prompt_tokens
        if checked.stream:
            waiting[model] += checked.prompt_tokens if choice is None else choice.pending
    models = {
        name: {
            "inflight": inflight[name] - held[name],
            "held": held[name],
            "waiting_prompt_tokens": waiting[name],
            "prompt_tokens": prompts[name],
            **(state.metrics.loads.get(name) or ModelLoad()).report(now_s),
        }
        for name in {*inflight, *state.metrics.loads} & state.router.models.keys()
    }
    return {
        "type": "load",
        "generation": state.generation,
        "replicas": {name: load.inflight for name, load in state.router.loads.items()},
        "models": models,
        "canaries": state.comparison.canaries,
        "notes": [] if certificate is None else certificate.notes(now_s),
        "certificate_expires_s": None if certificate is None else certificate.expires_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit status: 0 after a signal, 1 after a failure, 2 for bad
    settings. Once it accepts connections, the gateway prints a line {"event": "listening", "host", "port", …} on
    stdout."""
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway.main", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON file with a resolved GatewayConfig")
    arguments = parser.parse_args(argv)
    configure_logging("gateway")
    dies_as(DiesAs.GATEWAY)
    data = orjson.loads(arguments.config.read_bytes())
    try:
        config = GatewayConfig.from_mapping(data)
        site()  # read the page's files now, so that no stream waits for them later
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each client may need a connection to an engine
        private = None
        if config.private_socket is not None:
            Path(config.private_socket).unlink(missing_ok=True)
            private = private_socket(config.private_socket)
        uvloop.run(_serve(config, private))
        return 0
    except ConfigInvalid as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", config.host, config.port, error.strerror or error)
        return 1


async def _serve(config: GatewayConfig, private: socket.socket | None) -> None:
    """Listen, serve until a stop signal, then finish the open requests."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    gateway.state.background.keep("bus", gateway.run_bus)
    settle_garbage()
    port = await gateway.listen(config.host, config.port, private)
    line = {"time": timestamp(time.time()), "level": "info", "process": "gateway", "event": "listening"}
    print(orjson.dumps({**line, "host": config.host, "port": port}).decode(), flush=True)
    await stop.wait()
    log.info("stopping: %d connections", len(gateway.state.connections))
    await gateway.stop(config.shutdown_s)


if __name__ == "__main__":
    sys.exit(main())
