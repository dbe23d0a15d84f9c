"""Runs one gateway process: listeners, tables from the controller, the periodic sweep, shutdown.

One sweep, a few times a second, does the time-driven work of all connections; there is no timer per request.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Collection
from typing import Any

from appliance.gateway.core import errors
from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.inference.response_copies import ResponseCopies
from appliance.gateway.routing.holds import Refusal
from appliance.gateway.routing.moves import Waiting, moves
from appliance.gateway.routing.table import Table
from appliance.gateway.server.client_connection import ClientConnection
from appliance.gateway.server.dispatch import Dispatch
from appliance.gateway.server.tls_listener import newcomers_of, tls_listener
from appliance.gateway.state.placeable import Placeable
from appliance.gateway.state.reports import REFUSED_ROWS_REPORTED, gauges
from appliance.gateway.state.state import State
from runtime.network.newcomers import Newcomers

log = logging.getLogger("appliance.gateway")


class Gateway:
    """What one process of the gateway has."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.state = State(config)
        self.copies = ResponseCopies(self.state)
        self.dispatch = Dispatch(self.state, self.copies)
        self.secure: Newcomers | None = None
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    # -- life

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Accept clients on host:port (0: any port) and return the port."""
        if self._sweeper is None:
            self._sweeper = self.state.background.keep("sweep", self._sweep_forever)

        def client() -> Any:
            return ClientConnection(self.state, self.dispatch)

        context = self._tls()
        if context is not None:
            limits = self.config.limits
            self.secure = tls_listener(
                client,
                context,
                most=newcomers_of(limits.max_connections),
                handshake_s=limits.head_timeout_s,
                background=self.state.background,
                events=self.state.metrics.events,
            )
            return (await self.secure.listen(host, port, reuse_port=reuse_port))[1]
        loop = asyncio.get_running_loop()
        # uvloop's, whose `sockets` are a list; asyncio's are a tuple.
        server: Any = await loop.create_server(client, host, port, reuse_port=reuse_port, backlog=2048)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def close_listeners(self) -> None:
        """Stop accepting; open connections stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self.secure is not None:
            await self.secure.stop()

    async def stop(self, deadline_s: float) -> None:
        """Refuse new requests, let those in flight finish for `deadline_s` seconds, then end the rest with an error."""
        state = self.state
        state.stopping = True
        await self.close_listeners()
        until = time.monotonic() + deadline_s
        for conn in list(state.connections):
            conn.stop()
        while (state.connections or self.copies.delivering) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for conn in list(state.connections):
            if conn.active is not None:
                conn.active.cancel(errors.unavailable("The server is shutting down.", "shutting_down", 2))
        if state.connections:
            await asyncio.sleep(0.05)
        for conn in list(state.connections):
            conn.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.copies.close()
        state.pool.close()
        state.access_log.close()
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)

    def _tls(self) -> ssl.SSLContext | None:
        config, state = self.config, self.state
        if config.tls_cert_path is None or config.tls_key_path is None:
            return None
        if state.certificate is None:
            # Imported here: the certificate code adds 0.1 s to a start, and most gateways need none.
            from appliance.gateway.http.certificates import Certificate

            state.certificate = Certificate(config.tls_cert_path, config.tls_key_path)
        return state.certificate.context

    def reload(self) -> None:
        """Reload changed files now (SIGHUP)."""
        state = self.state
        if state.certificate is not None and state.certificate.look(time.monotonic(), at_once=True):
            state.on_change(True)

    # -- the controller's side

    def apply(self, table: Table) -> None:
        """Apply a routing table at once: end requests of revoked keys and held ones that their keys may not make any
        more, start held requests."""
        state = self.state
        changed_keys = state.keys != table.keys or state.sessions != table.sessions
        state.keys, state.sessions, state.expired = dict(table.keys), dict(table.sessions), dict(table.expired)
        state.session_ids = frozenset(session.id for session in table.sessions.values())
        state.tables_applied += 1
        state.spending.apply(table.keys.values())
        opened = state.router.apply(table.models)
        state.comparison.apply(table.models)
        state.metrics.forget_models(state.router.models)
        state.generation = table.generation
        if table.refused != state.refused_rows:
            new = [text for text in table.refused if text not in state.refused_rows]
            state.refused_rows = table.refused
            state.metrics.events["table_row_refused"] += len(new)
            for text in new[:REFUSED_ROWS_REPORTED]:
                log.error("bus: a row of the table is skipped, all others are in force: %s", text)
        if changed_keys:
            callers = {caller.id: caller for caller in table.keys.values()}
            for conn in list(state.connections):
                conn.keys_changed(callers)
        for ticket in list(state.holds):
            ticket.item.look_again()
        for name in state.holds.models():
            state.place_held(name)
            self._refuse_in_trouble(name)
        if opened and len(state.router.loads) > len(opened):
            self._move_to(opened)
        state.on_change(True)

    def end_removed(self, digests: Collection[str]) -> None:
        """Revoke the keys that are not among these (SHA-256, hex) before the rows of the table that has them are read:
        of ten thousand models that takes as long as 20 turns of a busy loop."""
        state = self.state
        if state.keys.keys() <= set(digests):
            return
        state.keys = {digest: caller for digest, caller in state.keys.items() if digest in digests}
        callers = {caller.id: caller for caller in state.keys.values()}
        state.sessions = {token: one for token, one in state.sessions.items() if one.caller.id in callers}
        state.session_ids = frozenset(session.id for session in state.sessions.values())
        for conn in list(state.connections):
            conn.keys_changed(callers)
        for ticket in list(state.holds):
            ticket.item.look_again()

    def _move_to(self, opened: set[str]) -> None:
        """Requests that wait at other replicas go to those that have just opened, where they are served sooner."""
        state = self.state
        waiting: dict[str, list[Waiting[Placeable]]] = {}
        for conn in state.connections:
            request = conn.active
            if isinstance(request, Placeable) and (at := request.waits_at)[0]:
                row = Waiting(request, at[0], request.waiting_prompt_tokens, at[1])
                waiting.setdefault(request.row, []).append(row)
        for name, rows in waiting.items():
            of_model = (
                {replica.id for replica in state.router.models[name].replicas} if name in state.router.models else set()
            )
            rate = state.metrics.prefill_tokens_per_s(name)
            for request in moves(rows, opened & of_model, state.router.loads, rate, time.monotonic()):
                request.move()

    def _refuse_in_trouble(self, name: str) -> None:
        """Refuse held requests of a model whose engines failed and will not be restarted soon."""
        state = self.state
        if state.next_try_s(name) is None:
            return
        for alone in (False, True):
            while (ticket := state.holds.first(name, alone=alone)) is not None:
                state.holds.remove(ticket)
                ticket.item.hold_refused(Refusal.TROUBLE)

    # -- time

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_s)
            self.sweep(time.monotonic())

    def sweep(self, now_s: float) -> None:
        """Deadlines, keep-alive comments, stalled clients, idle upstream connections, the access log."""
        state = self.state
        for ticket in state.holds.expired(now_s):
            ticket.item.hold_refused(Refusal.DEADLINE)
        for name in state.holds.models():
            state.place_held(name)
        for conn in list(state.connections):
            try:
                conn.tick(now_s)
            except Exception as error:  # noqa: BLE001 - logged; one connection's bug must not stall all others
                log.error("a connection was closed: checking its deadlines failed", exc_info=error)
                conn.abort()
        wanted = {replica.socket for model in state.router.models.values() for replica in model.replicas}
        wanted.add(self.config.controller_socket)
        state.pool.sweep(now_s, wanted)
        self.copies.sweep(now_s)
        state.access_log.flush()
        if state.certificate is not None and state.certificate.look(now_s):
            state.on_change(True)
        if state.snapshots is not None and state.snapshots.due(now_s):
            state.snapshots.write(state.metrics.families(gauges(state)), now_s)
