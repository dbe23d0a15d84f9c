"""The bus between the controller and the gateway: JSON lines over a Unix socket (0600).

The controller sends the whole routing table with a monotonic generation; the gateway sends load reports with the
generation it has applied and its current load. Three rules make a drain reliable:

1. A report counts only if it names the newest generation: a gateway that has not yet received a drain may still send
   requests.
2. A gateway whose connection closed counts with its last report for `gateway_gone_after_s`, then not at all: its
   connection ends with its process, and so do its requests; but it may only be reconnecting.
3. After the bus opened, nothing counts as drained until the gateway reported or `gateway_expected_s` have passed: it
   outlives a controller and carries streams that the next controller does not know of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
from msgspec import Struct, json

from appliance.controller.interfaces.config import ControllerConfig
from appliance.store.database import Database
from appliance.store.records import box
from runtime.background_tasks import BackgroundTasks
from runtime.network import private_socket


class ModelLoad(Struct, frozen=True):
    """Requests for one model. held: waiting for a replica. waiting_prompt_tokens: of requests known to have no first
    token yet; prompt_tokens: of all. computed_part: tokens that engines compute for an estimated one.
    prefill_tokens_per_s: of one replica. None where unknown.

    arrived_prompts: since the gateway began, requests by bucket of their prompt tokens
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
    """Counts for one version since a canary began. first_byte, duration: those that succeeded, by bucket of their time
    (`appliance.gateway.core.table`)."""

    requests: int = 0
    errors: int = 0
    first_byte: dict[int, int] = {}
    duration: dict[int, int] = {}


class CanaryLoad(Struct, frozen=True):
    since_s: float
    versions: dict[str, VersionLoad]


class ReplicaLoad(Struct, frozen=True):
    inflight: int = 0


class Report(Struct, frozen=True, tag_field="type", tag="load"):
    """generation: of the table that the gateway has applied; -1 of none. started_s: Unix time at which its process
    began. notes: for users. certificate_expires_s: of the endpoint's certificate, None without TLS."""

    generation: int = -1
    replicas: dict[str, ReplicaLoad] = {}
    models: dict[str, ModelLoad] = {}
    canaries: dict[str, CanaryLoad] = {}
    started_s: float = 0.0
    notes: list[str] = []
    certificate_expires_s: float | None = None

    def of_canary(self, model: str, since_s: float) -> Mapping[str, VersionLoad]:
        """Counts by version of the canary of this model that began then."""
        counted = self.canaries.get(model)
        return counted.versions if counted is not None and counted.since_s == since_s else {}


class Usage(Struct, frozen=True, tag_field="type", tag="usage"):
    rows: list[dict[str, Any]]


MESSAGE = json.Decoder(Report | Usage)
"""Raises msgspec.DecodeError."""


class Arrivals:
    """What arrived since it was last taken, from reports that count since the gateway's start.

    A gateway that was there before `since_s` (Unix time) counts from its first report: a restarted controller would
    take days of traffic for one burst. A name that a report lacks left the table, and counts from nothing later.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._last: Report | None = None
        self._new: dict[str, Counter[int]] = {}

    def add(self, report: Report) -> None:
        last, self._last = self._last, report
        if last is not None and report.started_s == last.started_s:
            before = last.models
        else:
            before = report.models if report.started_s < self._since_s else {}
        for name, row in report.models.items():
            known = Counter(before.get(name, ModelLoad()).arrived_prompts)
            self._new.setdefault(name, Counter()).update(Counter(row.arrived_prompts) - known)

    def take(self) -> dict[str, Counter[int]]:
        """By model, requests by the buckets of `ModelLoad`."""
        new, self._new = self._new, {}
        return new


log = logging.getLogger("appliance.controller")

CATCH_UP_S = 2.0
"""Longest wait of a changing request for the gateway, which needs milliseconds; a hung one must not stop changes."""
LOOK_EVERY_S = 0.05
"""How often a wait looks whether time alone has ended it."""
_GENERATIONS_PER_START = 10**9


def first_generation(db: Database) -> int:
    """A number above every generation that earlier controllers of this box have published."""
    return box.increment(db, "bus_starts") * _GENERATIONS_PER_START


class Bus:
    """Serves the gateway from `start` to `stop`: a new connection replaces the last. All methods belong to one event
    loop.

    on_load: called after every report. on_usage: called with the rows of every usage message. They must not block;
    their errors are recorded in `background` and break no connection.

    models, keys, generation: of the last published table; keys by SHA-256 in hex. first_generation: above any of an
    earlier controller's, or a gateway that still routes by an old table would count as having applied a new one.
    """

    def __init__(
        self, path: Path, config: ControllerConfig, *, first_generation: int, background: BackgroundTasks | None = None
    ):
        self._path, self._config, self._background = path, config, background or BackgroundTasks()
        self.on_load: Callable[[], Any] = lambda: None
        self.on_usage: Callable[[list[dict[str, Any]]], Any] = lambda rows: None
        self.generation = first_generation
        self.models: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self._degraded: list[str] = []
        self._line = b""
        self._writer: asyncio.StreamWriter | None = None  # of the gateway's connection
        self._report = Report()  # its last one
        self._lost_at_s = 0.0  # when its connection closed
        self._wake, self._changed = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None
        self._opened_s = 0.0
        self._ever_reported = False
        self.arrivals = Arrivals(time.time())
        self._encode()

    async def start(self) -> None:
        """Listen. A socket file that a killed controller left is replaced."""
        self._path.unlink(missing_ok=True)
        self._opened_s = self._now_s()
        self._server = await asyncio.start_unix_server(
            self._serve, sock=private_socket(self._path), limit=self._config.bus_line_bytes
        )

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        if self._writer is not None:
            self._writer.close()
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    # --- publishing

    def set_models(self, models: dict[str, Any]) -> int:
        """Publish the table's models (appliance.gateway.core.table). Returns the generation that carries them."""
        if models != self.models:
            self.models = models
            self._next_generation()
        return self.generation

    def keys_changed(self, keys: dict[str, dict[str, Any]]) -> None:
        """keys: SHA-256 in hex -> {"id", "name", "scopes"} and those of "models", "requests_per_minute",
        "tokens_per_minute", "spent_until_s", "spent_quota" that limit the key; replaces the previous set."""
        if keys != self.keys:
            self.keys = keys
            self._next_generation()

    def set_degraded(self, names: list[str]) -> None:
        """Capabilities that the box lacks now, for the gateway's /health."""
        if names != self._degraded:
            self._degraded = names
            self._next_generation()

    # --- listening

    def load(self) -> Report:
        """The gateway's last report, while it is connected or was lost only recently."""
        self._forget_gone()
        return self._report

    def inflight(self, replica_id: str) -> int:
        return self.load().replicas.get(replica_id, ReplicaLoad()).inflight

    async def wait_applied(self, generation: int) -> None:
        """Returns when the gateway routes by a table at least as new."""
        await self._wait(lambda: self._writer is None or self._report.generation >= generation)

    async def caught_up(self) -> None:
        """Returns when a connected gateway routes by the current table, after `CATCH_UP_S` at the latest."""
        if self._writer is None:
            return
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self.wait_applied(self.generation)
        except TimeoutError:
            log.warning("a change is answered before the gateway knows it")

    async def wait_drained(self, replica_id: str) -> None:
        """Returns when the gateway has no request at this replica, which is not open in the table, and none can
        start."""
        await self._wait(lambda: self._is_drained(replica_id))

    def _is_drained(self, replica_id: str) -> bool:
        replicas = (replica for model in self.models.values() for replica in model["replicas"])
        if any(replica["id"] == replica_id and replica["state"] == "open" for replica in replicas):
            return False
        if self._writer is None and self._report.generation < 0:
            return True
        # The newest table, not just the one that closed the replica: one rule, and the gateway lags only briefly.
        return self._report.generation >= self.generation and not self.inflight(replica_id)

    async def _wait(self, done: Callable[[], bool]) -> None:
        while True:
            # Cleared before the check: a report that arrives after it sets the event again.
            self._changed.clear()
            self._forget_gone()
            too_early = not self._ever_reported and self._now_s() - self._opened_s < self._config.gateway_expected_s
            if not too_early and done():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    def _forget_gone(self) -> None:
        if self._writer is None and self._now_s() - self._lost_at_s >= self._config.gateway_gone_after_s:
            self._report = Report()

    # --- the connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._wake = writer, asyncio.Event()
        sender = asyncio.create_task(self._send_tables(writer, self._wake), name="bus sender")
        try:
            while line := await reader.readline():
                self._take(line, writer)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("bus: the gateway sent an invalid message, connection closed: %s", error)
        except OSError as error:
            log.info("bus: the connection of the gateway broke: %s", error)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if self._writer is writer:
                self._writer, self._lost_at_s = None, self._now_s()
                self._changed.set()
            writer.close()

    def _take(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        """Raises msgspec.DecodeError for a message that is none of a gateway's. Our own errors, such as a full disk,
        are recorded, and the connection stays. Of a connection that was replaced, only usage still counts."""
        report = MESSAGE.decode(line)
        if isinstance(report, Usage):
            with self._background.guard("usage"):
                self.on_usage(report.rows)
            if not writer.is_closing():
                writer.write(b'{"type":"counted"}\n')  # also invalid rows, or they would come without end
        if isinstance(report, Usage) or self._writer is not writer:
            return
        self.arrivals.add(report)
        self._report = report
        self._ever_reported = True
        self._changed.set()
        with self._background.guard("what load reports set off"):
            self.on_load()

    async def _send_tables(self, writer: asyncio.StreamWriter, wake: asyncio.Event) -> None:
        """Only the newest table is sent: a slow gateway skips those in between."""
        sent = -1
        with contextlib.suppress(OSError):  # the reading side sees the same end and handles it
            while True:
                wake.clear()
                if sent < self.generation:
                    sent = self.generation
                    writer.write(self._line)
                await writer.drain()
                await wake.wait()

    def _next_generation(self) -> None:
        self.generation += 1
        self._encode()
        self._wake.set()

    def _encode(self) -> None:
        table = {
            "type": "table",
            "generation": self.generation,
            "models": self.models,
            "keys": self.keys,
            "degraded": self._degraded,
        }
        self._line = orjson.dumps(table, option=orjson.OPT_APPEND_NEWLINE)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
