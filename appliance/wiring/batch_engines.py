"""Sends batch lines to the engines over the replicas' own sockets, bypassing the gateways.

Bypassing them means that no line is ever held, counted as demand, or delays a drain: the moment a replica leaves the
routing table, its lines are recalled and wait for the next idle engine. The gateways' own rules check what a request
may contain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import orjson

from appliance.controller.batches import share
from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.ports import BatchCapacity, EngineAnswer, LineReturned
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import resolve as route_of
from appliance.gateway.payload.request_check import check_body, with_fields, with_model
from appliance.store.database import Database
from appliance.store.objects import jobs
from scheduler.core.workload import Demand

CONNECT_S = 5.0
# A dying engine answers 500 before it exits; a 404 for a model in the table means it has just switched models.
_DEAD, _MOVED = "EngineCore", "The model "
_KEPT = "the model's engine is kept for one line, whose last engine died"


class SocketEngines:
    """Implements `appliance.controller.interfaces.ports.BatchEngines`.

    hosts: the model on whose engines a name is served (itself, except for adapters). circumstances: (policy in force,
    whether jobs want devices, free devices). on_wants: called when `wants` changed, so that the scheduler replans.
    """

    def __init__(
        self,
        bus: Bus,
        config: ControllerConfig,
        limits: Limits,
        hosts: Callable[[str], str],
        circumstances: Callable[[], tuple[str, bool, int]],
        on_wants: Callable[[], Any],
    ):
        self._bus, self._config, self._limits = bus, config, limits
        self._hosts, self._circumstances, self._on_wants = hosts, circumstances, on_wants
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._lines: dict[asyncio.Task[httpx.Response], tuple[str, str]] = {}
        self._kept_for_one: set[str] = set()
        self._wanted: dict[str, list[str]] = {}
        self._changed = asyncio.Event()
        self._check_turn = asyncio.Lock()

    # --- ports.BatchEngines

    def room(self, model: str) -> BatchCapacity:
        config, engines = self._config, self._free(model)
        if not engines and self._open(model):
            return BatchCapacity(0, _KEPT)
        return share.room(
            {model, self._hosts(model)},
            list(engines),
            self._bus.load(),
            lines_per_engine=config.batch_lines_per_engine,
            busy_inflight=config.batch_busy_inflight,
        )

    async def send(
        self, model: str, url: str, body: dict[str, Any], request_id: str, *, alone: bool = False
    ) -> EngineAnswer:
        # One after the other, with the loop free in between: a form takes up to 50 ms, and all lines that engines have
        # room for come at once.
        async with self._check_turn:
            await asyncio.sleep(0)
            content = orjson.dumps(body)
            try:
                ending = self._check(url, content)
            except gateway_errors.HttpError as error:
                return EngineAnswer(error.status, orjson.loads(error.body()))
        if ending:
            content = with_fields(content, ending)
        replica_id, socket = self._least_loaded(model)
        if not alone:
            return await self._ask(model, replica_id, socket, url, content, request_id)
        self._kept_for_one.add(replica_id)
        try:
            while others := [asking for asking, (_, where) in self._lines.items() if where == replica_id]:
                await asyncio.wait(others)
            if replica_id not in self._open(model):
                raise LineReturned("the engine was wanted for something else", yielded=True)
            return await self._ask(model, replica_id, socket, url, content, request_id)
        finally:
            self._kept_for_one.discard(replica_id)
            self._changed.set()

    def _check(self, url: str, content: bytes) -> bytes:
        """What is added to its fields. Raises HttpError."""
        if len(content) > self._limits.inference_body_bytes:
            # Conversations of background responses are assembled behind the gateways, which enforce the size limit.
            raise gateway_errors.body_too_large(self._limits.inference_body_bytes)
        checked = check_body(route_of(b"POST", url.encode()), content, self._limits)
        transcript = checked.transcript
        if transcript is not None and (transcript.previous_id or transcript.background):
            raise gateway_errors.bad_request(
                "A request of a batch has no `previous_response_id` and is not in `background`.",
                param="previous_response_id" if transcript.previous_id else "background",
                code="unsupported_parameter",
            )
        return checked.ending

    async def _ask(
        self, model: str, replica_id: str, socket: str, url: str, content: bytes, request_id: str
    ) -> EngineAnswer:
        """Raises LineReturned."""
        adapter = self._bus.models[model].get("adapter")
        if adapter:
            content = with_model(content, adapter)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": request_id,
            # As one owner in an engine's queue (serve.api.fair_order): theirs have taken turns before it comes here.
            "x-appliance-owner": "batches",
        }
        asking = asyncio.create_task(self._client(socket).post(url, content=content, headers=headers))
        self._lines[asking] = (model, replica_id)
        try:
            await asyncio.wait([asking])
        finally:
            self._lines.pop(asking, None)
            asking.cancel()  # no effect once it has ended
        rows = self._bus.models.get(model, {}).get("replicas", ())
        version = next((row["version"] for row in rows if row["id"] == replica_id), "")
        return replace(_answer(asking), version=version)

    def wants(self, models: list[str], asker: str = "batches") -> None:
        if models != self._wanted.get(asker, []):
            self._wanted[asker] = models
            self._on_wants()

    async def changed(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    # --- the rest of the box

    def load_changed(self) -> None:
        """A gateway reported, or the table changed: recall lines whose engine is wanted for something else."""
        for asking, (model, replica_id) in list(self._lines.items()):
            if replica_id not in self._open(model):
                asking.cancel()
        self._changed.set()

    def demand(self, host: str, reported: Demand) -> Demand:
        """The gateways' reported demand for a model, plus that of batches where it is in nobody's way."""
        wanted = [name for models in self._wanted.values() for name in models]
        name = next((name for name in wanted if self._hosts(name) == host), None)
        if name is None or reported.requests:
            return reported
        policy, jobs_want_devices, free_devices = self._circumstances()
        others = share.others_asked(self._bus.load(), {host, name})
        if not share.may_wake(policy, jobs_want_devices, others, free_devices):
            return reported
        return share.with_wish(reported, bool(self._open(name)), time.time())

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _open(self, model: str) -> dict[str, str]:
        return share.open_engines(self._bus.models.get(model))

    def _free(self, model: str) -> dict[str, str]:
        """Of the open ones, those that are not kept for one line."""
        return {name: socket for name, socket in self._open(model).items() if name not in self._kept_for_one}

    def _least_loaded(self, model: str) -> tuple[str, str]:
        """(replica id, socket) of the engine with the fewest lines. Raises LineReturned."""
        engines = self._free(model)
        if not engines:
            raise LineReturned(_KEPT if self._open(model) else "no engine of the model is awake", yielded=True)
        busy = [replica_id for _, replica_id in self._lines.values()]
        least = min(engines, key=lambda replica_id: (busy.count(replica_id), replica_id))
        return least, engines[least]

    def _client(self, socket: str) -> httpx.AsyncClient:
        if socket not in self._clients:
            self._clients[socket] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None)),
                base_url="http://engine",
                timeout=httpx.Timeout(self._limits.upstream_silence_s, connect=CONNECT_S),
            )
        return self._clients[socket]


def circumstances(db: Database, box_floor: int, loop_status: Callable[[], Mapping[str, Any]]) -> tuple[str, bool, int]:
    """(policy in force, whether jobs want devices, devices that nobody holds)."""
    policy = mode_in_force(db, box_floor, time.time()).policy.kind
    wanting = any(
        row.phase in ("queued", "running", "suspended") and row.wanted == "run" and not row.held
        for row in jobs.list_unfinished(db)
    )
    return policy, wanting, sum(device["holder"] is None for device in loop_status()["devices"])


def _answer(asking: asyncio.Task[httpx.Response]) -> EngineAnswer:
    """Raises LineReturned."""
    if asking.cancelled():
        raise LineReturned("the engine was wanted for something else", yielded=True)
    failure = asking.exception()
    if isinstance(failure, httpx.ConnectError):
        raise LineReturned(f"the engine is gone: {failure}", yielded=True) from failure
    if isinstance(failure, httpx.TransportError):
        raise LineReturned(f"{type(failure).__name__} {failure}".strip(), yielded=False) from failure
    response = asking.result()
    if response.status_code == 200:
        try:
            return EngineAnswer(200, orjson.loads(response.content))
        except orjson.JSONDecodeError:
            # An exception here would lose the line: neither answered nor paid for.
            return EngineAnswer(502, orjson.loads(gateway_errors.engine_failed().body()))
    error = gateway_errors.from_upstream(response.status_code, response.content)
    if error.status == 404 and error.message.startswith(_MOVED):
        raise LineReturned(error.message, yielded=True)
    if error.status >= 500 and _DEAD in error.message:
        raise LineReturned(error.message, yielded=False)
    return EngineAnswer(error.status, orjson.loads(error.body()))
