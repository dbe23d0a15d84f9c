"""The bus between the controller and the gateway: JSON lines over a Unix socket (0600).

The controller sends the whole routing table with a monotonic generation; the gateway sends load reports with the
generation it has applied and its current load. Two rules make a drain reliable:

1. A report counts only if it names the newest generation: a gateway that has not yet received a drain may still send
   requests.
2. A gateway counts, with its last report, until its connection has been closed for `gateway_gone_after_s`: its requests
   end with its process, but it may only be reconnecting. A gateway that has not connected yet also counts: it outlives
   a controller, and may carry streams unknown to the next controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
from msgspec import Struct, json

from appliance.controller.interfaces.config import ControllerConfig
from appliance.store import box
from appliance.store.database import Database
from runtime.background_tasks import BackgroundTasks
from runtime.network import private_socket


class ModelLoad(Struct, frozen=True):
    """Requests for one model. held: requests waiting for a replica. waiting_prompt_tokens: prompt tokens of streams
    without a first token yet; prompt_tokens: of all requests. computed_part: tokens computed per estimated prompt
    token. prefill_tokens_per_s: rate of one replica. None: unknown.

    arrived_prompts: new requests since the last report, by bucket of their prompt tokens
    (`appliance.gateway.core.table`)."""

    inflight: int = 0
    held: int = 0
    last_request_s: float | None = None
    tpot_p95_s: float | None = None
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    computed_part: float | None = None
    prefill_tokens_per_s: float | None = None
    arrived_prompts: dict[int, int] = {}


class VersionLoad(Struct, frozen=True):
    """Counts for one version since a canary began. first_byte, duration: numbers of successful requests by bucket of
    time (`appliance.gateway.core.table`)."""

    requests: int = 0
    errors: int = 0
    first_byte: dict[int, int] = {}
    duration: dict[int, int] = {}


class CanaryLoad(Struct, frozen=True):
    since_s: float
    versions: dict[str, VersionLoad]


class Report(Struct, frozen=True, tag_field="type", tag="load"):
    """A gateway's report. generation: of the table that it has applied, -1: no table. replicas: {replica: requests in
    flight}. notes: sentences for users. certificate_expires_s: Unix time, None without TLS."""

    generation: int = -1
    replicas: dict[str, int] = {}
    models: dict[str, ModelLoad] = {}
    canaries: dict[str, CanaryLoad] = {}
    notes: list[str] = []
    certificate_expires_s: float | None = None


class Usage(Struct, frozen=True, tag_field="type", tag="usage"):
    rows: list[dict[str, Any]]


MESSAGE = json.Decoder(Report | Usage)
log = logging.getLogger("appliance.controller")

LINE_BYTES = 64 << 20
CATCH_UP_S = 2.0  # a change waits at most this long for the gateway, which normally takes milliseconds
LOOK_EVERY_S = 0.05  # how often a wait checks whether the gateway has been gone too long, which no event reports
_GENERATIONS_PER_START = 10**9


def first_generation(db: Database) -> int:
    """Return a number above all generations that earlier controllers of this box published."""
    with db.transaction():
        starts = int(box.get(db, "bus_starts", 0)) + 1
        box.put(db, "bus_starts", starts)
    return starts * _GENERATIONS_PER_START


class Bus:
    """Serves the gateway from `start` to `stop`: a new connection replaces the last. All methods belong to one event
    loop.

    on_load: called after every report. on_usage: called with the rows of every usage message. Neither may block; their
    errors are recorded in `background` and close no connection.

    table: last published (`appliance.gateway.core.table`): models by name, keys by SHA-256 in hex, and names of
    degraded parts. first_generation: above all earlier controllers' generations; else a gateway with an old table would
    count as having applied a new one.
    """

    def __init__(
        self, path: Path, config: ControllerConfig, *, first_generation: int, background: BackgroundTasks | None = None
    ):
        self._path, self._config, self._background = path, config, background or BackgroundTasks()
        self.on_load: Callable[[], Any] = lambda: None
        self.on_usage: Callable[[list[dict[str, Any]]], Any] = lambda rows: None
        self.generation = first_generation
        self.table: dict[str, Any] = {"models": {}, "keys": {}, "degraded": []}
        self._writer: asyncio.StreamWriter | None = None  # writer of the gateway's connection
        self._alone_since_s = time.monotonic()  # without a connection: monotonic time of its end or of `start`
        self._report = Report()  # the gateway's last report
        self._arrived: dict[str, Counter[int]] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server

    async def start(self) -> None:
        """Listen. A socket file left by a killed controller is replaced."""
        self._path.unlink(missing_ok=True)
        self._alone_since_s = time.monotonic()
        self._server = await asyncio.start_unix_server(self._serve, sock=private_socket(self._path), limit=LINE_BYTES)

    async def stop(self) -> None:
        self._server.close()
        if self._writer is not None:
            self._writer.close()
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    # --- publishing

    def publish(self, **parts: Any) -> int:
        """Replace these parts of the table. Returns the generation that carries them."""
        if any(self.table[name] != part for name, part in parts.items()):
            self.table |= parts
            self.generation += 1
            self._send_table()
        return self.generation

    def _send_table(self) -> None:
        if self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > LINE_BYTES:
            self._writer.transport.abort()  # the gateway does not read; after a reconnect it gets the newest table
            return
        message = {"type": "table", "generation": self.generation, **self.table}
        self._writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    # --- listening

    def load(self) -> Report:
        """Return the gateway's last report; an empty report if the gateway is gone."""
        if self._is_gone():
            self._report = Report()
        return self._report

    def take_arrivals(self) -> dict[str, Counter[int]]:
        """Return the requests since the last call as {model: numbers by bucket of prompt tokens}, and reset them."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def inflight(self, replica_id: str) -> int:
        return self.load().replicas.get(replica_id, 0)

    async def wait_applied(self, generation: int) -> None:
        """Return when the gateway routes by a table of this generation or a newer one."""
        await self._wait(lambda: self._report.generation >= generation)

    async def caught_up(self) -> None:
        """Return when a connected gateway routes by the current table, after `CATCH_UP_S` at the latest."""
        if self._writer is None:
            return
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self.wait_applied(self.generation)
        except TimeoutError:
            log.warning("a change is answered before the gateway knows it")

    async def wait_drained(self, replica_id: str) -> None:
        """Return when a draining replica has no requests from the gateway, and no new one can start."""

        def drained() -> bool:
            # Wait for the newest table, not the one that closed the replica: simpler, and the gateway lags only
            # briefly.
            return self._report.generation >= self.generation and not self._report.replicas.get(replica_id)

        await self._wait(drained)

    async def _wait(self, done: Callable[[], bool]) -> None:
        while True:
            # Cleared before the check: a report that arrives after it sets the event again.
            self._changed.clear()
            if done() or self._is_gone():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    def _is_gone(self) -> bool:
        return self._writer is None and time.monotonic() - self._alone_since_s >= self._config.gateway_gone_after_s

    # --- the gateway's connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = writer
        self._send_table()
        try:
            while line := await reader.readline():
                self._take(line, writer)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("bus: the gateway sent an invalid message, connection closed: %s", error)
        except OSError as error:
            log.info("bus: the connection of the gateway broke: %s", error)
        finally:
            if self._writer is writer:
                self._writer, self._alone_since_s = None, time.monotonic()
            writer.close()

    def _take(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        """Handle a message. Errors of the handlers, such as a full disk, are recorded, and the connection stays. From a
        replaced connection, only usage still counts. Raises msgspec.DecodeError."""
        message = MESSAGE.decode(line)
        if isinstance(message, Usage):
            with self._background.guard("usage"):
                self.on_usage(message.rows)
            if not writer.is_closing():
                writer.write(b'{"type":"counted"}\n')  # also acknowledge invalid rows, else the gateway repeats them
        elif self._writer is writer:
            self._report = message
            for name, row in message.models.items():
                self._arrived.setdefault(name, Counter()).update(row.arrived_prompts)
            self._changed.set()
            with self._background.guard("what load reports set off"):
                self.on_load()
