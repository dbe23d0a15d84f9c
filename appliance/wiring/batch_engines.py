"""Sends batch lines, and requests for the rollouts of jobs that train, to the engines over the replicas' own sockets,
bypassing the gateways.

Bypassing them means that no line is ever held, counted as demand, or delays a drain: the moment a replica leaves the
routing table, its lines are recalled and wait for the next idle engine. The gateways' own rules check what a request
may contain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx
import orjson

from appliance.controller.batches import share
from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.ports import SAMPLING, BatchCapacity, EngineAnswer, LineReturned
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import resolve as route_of
from appliance.gateway.payload.request_check import Checked, check_body, with_model
from appliance.gateway.routing.router import BATCH_BEHIND
from appliance.gateway.routing.table import cache_salt
from appliance.store.database import Database
from appliance.store.objects import jobs
from scheduler.core.workload import Demand
from serve.core import sampling

log = logging.getLogger(__name__)

CONNECT_S = 5.0
# A dying engine answers 500 before it exits; a 404 for a model in the table means it has just switched models.
_DEAD, _MOVED = "EngineCore", "The model "
_KEPT = "the model's engine is kept for one line, whose last engine died"
_LONG_BYTES = 64 << 10
"""Reading an answer of this size takes the loop a millisecond; one with all log-probabilities that a request may ask
for takes 40."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """policy, floor (devices that serving keeps): those in force. free_devices: how many nobody holds."""

    policy: str
    jobs_want_devices: bool
    free_devices: int
    floor: int = 0


class SocketEngines:
    """Implements `appliance.controller.interfaces.ports.BatchEngines`.

    hosts: the model on whose engines a name is served (itself, except for adapters). circumstances: what may be woken
    depends on. on_wants: called when `wants` changed, so that the scheduler replans.
    """

    def __init__(
        self,
        bus: Bus,
        config: ControllerConfig,
        limits: Limits,
        hosts: Callable[[str], str],
        circumstances: Callable[[], Circumstances],
        on_wants: Callable[[], Any],
    ):
        self._bus, self._config, self._limits = bus, config, limits
        self._hosts, self._circumstances, self._on_wants = hosts, circumstances, on_wants
        self._clients: dict[str, httpx.AsyncClient] = {}  # by socket
        self._clients_looked_at = 0  # how many were left by the last look for those of engines that have gone
        self._lines: dict[asyncio.Task[httpx.Response], tuple[str, str]] = {}
        self._sampling: dict[str, str] = {}  # request id -> socket
        self._kept_for_one: set[str] = set()
        self._wanted: dict[str, list[str]] = {}
        self._changed = asyncio.Event()
        self._check_turn, self._reading_turn = asyncio.Lock(), asyncio.Lock()

    # --- ports.BatchEngines

    def host(self, model: str) -> str:
        return self._hosts(model)

    def room(self, model: str) -> BatchCapacity:
        engines = self._free(model)
        if not engines:
            return BatchCapacity(0, _KEPT) if self._open(model) else self._capacity(model, engines)
        return share.at_least_one(self._capacity(model, engines))

    def sampling_room(self, model: str, version: str) -> BatchCapacity:
        engines = self._free(model, version)
        if not engines and self._open(model):
            return BatchCapacity(0, f"no engine of the model has its version {version}")
        return self._capacity(model, engines)

    def _capacity(self, model: str, engines: Mapping[str, str]) -> BatchCapacity:
        return share.room(
            {model, self._hosts(model)},
            list(engines),
            self._bus.load(),
            lines_per_engine=self._config.batch_lines_per_engine,
            busy_inflight=self._config.batch_busy_inflight,
        )

    async def send(
        self, model: str, url: str, body: dict[str, Any], request_id: str, *, owner: str = "", alone: bool = False
    ) -> EngineAnswer:
        # One after the other, with the loop free in between: a form takes up to 50 ms, and all lines that engines have
        # room for come at once.
        async with self._check_turn:
            await asyncio.sleep(0)
            content = orjson.dumps(body)
            try:
                checked = self._check(url, content)
            except gateway_errors.HttpError as error:
                return EngineAnswer(error.status, orjson.loads(error.body()))
        content = checked.rewritten or content
        await self._close_left()
        replica_id, socket = self._least_loaded(model)
        if not alone:
            return await self._ask(model, replica_id, socket, url, content, request_id, owner)
        self._kept_for_one.add(replica_id)
        try:
            while others := [asking for asking, (_, where) in self._lines.items() if where == replica_id]:
                await asyncio.wait(others)
            if replica_id not in self._open(model):
                raise LineReturned("the engine was wanted for something else", yielded=True)
            return await self._ask(model, replica_id, socket, url, content, request_id, owner)
        finally:
            self._kept_for_one.discard(replica_id)
            self._changed.set()

    async def sample(self, model: str, version: str, body: dict[str, Any], request_id: str) -> EngineAnswer:
        await self._close_left()
        replica_id, socket = self._least_loaded(model, version)
        self._sampling[request_id] = socket
        try:
            content = orjson.dumps({**body, "priority": 2 * BATCH_BEHIND})
            return await self._posted(model, replica_id, socket, sampling.URL, content, request_id, sampling.ROLLOUTS)
        finally:
            del self._sampling[request_id]

    async def interrupt(self, request_ids: Collection[str]) -> None:
        by_socket: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._sampling:
                by_socket.setdefault(self._sampling[request_id], []).append(request_id)
        await asyncio.gather(*(self._interrupt(socket, ids) for socket, ids in by_socket.items()))

    async def _interrupt(self, socket: str, request_ids: list[str]) -> None:
        content = orjson.dumps(sampling.interrupt(request_ids))
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        try:
            await self._client(socket).post(sampling.INTERRUPT_URL, content=content, headers=headers, timeout=CONNECT_S)
        except httpx.TransportError as error:  # an engine that is gone has ended them
            log.info("an engine was not told to interrupt %d rollouts: %s", len(request_ids), error)

    def _check(self, url: str, content: bytes) -> Checked:
        """Raises HttpError."""
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
        return checked

    async def _ask(
        self, model: str, replica_id: str, socket: str, url: str, content: bytes, request_id: str, owner: str
    ) -> EngineAnswer:
        """Raises LineReturned."""
        adapter = self._bus.models[model].get("adapter")
        if adapter:
            content = with_model(content, adapter)
        return await self._posted(model, replica_id, socket, url, content, request_id, f"batches-{cache_salt(owner)}")

    async def _posted(
        self, model: str, replica_id: str, socket: str, url: str, content: bytes, request_id: str, owner: str
    ) -> EngineAnswer:
        """Raises LineReturned."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": request_id,
            "x-appliance-owner": owner,
            "x-vllm-priority": str(BATCH_BEHIND),
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
        return replace(await self._read(asking), version=version)

    async def _read(self, asking: asyncio.Task[httpx.Response]) -> EngineAnswer:
        """Read long answers one after the other and leave the loop free for as long in between: sixteen lines of one
        engine that ended with the same step held it for more than a second. Raises LineReturned."""
        if asking.cancelled() or asking.exception() is not None or len(asking.result().content) <= _LONG_BYTES:
            return _answer(asking)
        async with self._reading_turn:
            began_s = time.monotonic()
            answer = _answer(asking)
            await asyncio.sleep(time.monotonic() - began_s)
        return answer

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

    def demands(self) -> Callable[[str, Demand], Demand]:
        """Return, for one round of the scheduler, a function that adds batches and rollouts to the demand that gateways
        report of a model, where they are in nobody's way. What all of the thousands of models need is computed once."""
        lines: dict[str, str] = {}
        for name in (name for asker, models in self._wanted.items() if asker != SAMPLING for name in models):
            lines.setdefault(self._hosts(name), name)
        sampled = {self._hosts(name) for name in self._wanted.get(SAMPLING, ())}
        asked, circumstances = share.models_with_requests(self._bus.load()), cache(self._circumstances)

        def demand(host: str, reported: Demand) -> Demand:
            name = lines.get(host)
            if (name is None and host not in sampled) or reported.requests:
                return reported
            now, its = circumstances(), {host, name or host}
            others = len(asked) > len(asked & its)
            awake = bool(self._open(name or host))
            for_lines = name is not None and share.may_wake(now.policy, now.jobs_want_devices, others, now.free_devices)
            for_samples = host in sampled and (
                awake or share.may_wake_to_sample(now.policy, now.floor, others, now.free_devices)
            )
            return share.with_wish(reported, awake, time.time()) if for_lines or for_samples else reported

        return demand

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _open(self, model: str, version: str | None = None) -> dict[str, str]:
        return share.open_engines(self._bus.models.get(model), version)

    def _free(self, model: str, version: str | None = None) -> dict[str, str]:
        """The open engines that are not kept for one line."""
        return {name: socket for name, socket in self._open(model, version).items() if name not in self._kept_for_one}

    def _least_loaded(self, model: str, version: str | None = None) -> tuple[str, str]:
        """(replica id, socket) of the engine with the fewest lines. Raises LineReturned."""
        engines = self._free(model, version)
        if not engines:
            raise LineReturned(_KEPT if self._open(model) else "no engine of the model is awake", yielded=True)
        busy = [replica_id for _, replica_id in self._lines.values()]
        least = min(engines, key=lambda replica_id: (busy.count(replica_id), replica_id))
        return least, engines[least]

    async def _close_left(self) -> None:
        """Close the connections to engines that have gone: each engine has a socket of its own, and those of all that
        ever answered a line stayed open. All names of the table are looked at for it, once for a new engine."""
        if len(self._clients) <= self._clients_looked_at:
            return
        there = {replica["socket"] for row in self._bus.models.values() for replica in row.get("replicas", ())}
        left = [self._clients.pop(socket) for socket in self._clients.keys() - there]
        self._clients_looked_at = len(self._clients)
        for client in left:
            await client.aclose()

    def _client(self, socket: str) -> httpx.AsyncClient:
        if socket not in self._clients:
            self._clients[socket] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None)),
                base_url="http://engine",
                timeout=httpx.Timeout(self._limits.upstream_silence_s, connect=CONNECT_S),
            )
        return self._clients[socket]


def circumstances(db: Database, box_floor: int, loop_status: Callable[[], Mapping[str, Any]]) -> Circumstances:
    policy = mode_in_force(db, box_floor, time.time()).policy
    free = sum(device["holder"] is None for device in loop_status()["devices"])
    return Circumstances(policy.kind, jobs.any_wants_devices(db), free, policy.serving_floor)


def _answer(asking: asyncio.Task[httpx.Response]) -> EngineAnswer:
    """Raises LineReturned."""
    if asking.cancelled():
        raise LineReturned("the engine was wanted for something else", yielded=True)
    failure = asking.exception()
    if isinstance(failure, httpx.ConnectError):
        raise LineReturned(f"the engine is gone: {failure}", yielded=True) from failure
    if isinstance(failure, httpx.ReadTimeout):
        # The engine lives. When this counted as its death, a long answer was sent to a second engine and never billed.
        return EngineAnswer(504, orjson.loads(gateway_errors.engine_failed(504).body()), silent=True)
    if isinstance(failure, httpx.TransportError):
        raise LineReturned(f"{type(failure).__name__} {failure}".strip(), yielded=False) from failure
    response = asking.result()
    if response.status_code == 200:
        try:
            return EngineAnswer(200, orjson.loads(response.content))
        except orjson.JSONDecodeError:
            # An exception here would lose the line: it would be neither answered nor billed.
            return EngineAnswer(502, orjson.loads(gateway_errors.engine_failed().body()))
    error = gateway_errors.from_upstream(response.status_code, response.content)
    if error.status == 404 and error.message.startswith(_MOVED):
        raise LineReturned(error.message, yielded=True)
    if error.status >= 500 and _DEAD in error.message:
        raise LineReturned(error.message, yielded=False)
    return EngineAnswer(error.status, orjson.loads(error.body()))
