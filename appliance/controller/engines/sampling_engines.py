"""Sends requests for the rollouts of jobs that train to engines over the replicas' own sockets: the model that they
name may be one in training, which no gateway knows.

The moment a replica leaves the routing table, its requests come back and wait for the next idle engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import httpx
import orjson

from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.records import BatchCapacity, EngineAnswer, LineReturned
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.router import BATCH_BEHIND
from appliance.gateway.core.table import OPEN
from runtime.network.mutual_tls import http_options
from serve.core import sampling

log = logging.getLogger(__name__)

CONNECT_S = 5.0
REQUESTS_PER_ENGINE, BUSY_INFLIGHT = 16, 4
"""Requests that an idle engine has at once, proportionally fewer while it has interactive ones, none from
BUSY_INFLIGHT on."""
# A dying engine answers 500 before it exits; a 404 for a model in the table means it has just switched models.
_DEAD, _MOVED = "EngineCore", "The model "


class SocketEngines:
    """nudge: called when `wanted` changed, so that the scheduler replans."""

    def __init__(self, bus: Bus, limits: Limits, nudge: Callable[[], Any]):
        self._bus, self._limits, self._nudge = bus, limits, nudge
        bus.on_load.append(self.load_changed)
        bus.on_table.append(self.load_changed)
        self.wanted: list[str] = []
        self._clients: dict[str, httpx.AsyncClient] = {}  # by socket
        self._asking: dict[asyncio.Task[httpx.Response], tuple[str, str, str]] = {}
        self._sockets: dict[str, str] = {}  # by request id
        self._changed = asyncio.Event()

    def room(self, model: str, version: str) -> BatchCapacity:
        """Of the engines that have this version of the model's weights, for all jobs together."""
        engines = self._open(model, version)
        if not engines:
            why = f"no engine of the model has its version {version}" if self._open(model) else "no engine is awake"
            return BatchCapacity(0, why)
        load = self._bus.load()
        if model in load.models and load.models[model].held:
            return BatchCapacity(0, "interactive requests of the model are waiting")
        inflight = [load.replicas.get(engine, 0) for engine in engines]
        lines = sum(REQUESTS_PER_ENGINE * max(0, BUSY_INFLIGHT - number) // BUSY_INFLIGHT for number in inflight)
        return BatchCapacity(lines, "" if lines else "the engines of the model are busy with interactive requests")

    async def sample(self, model: str, version: str, body: dict[str, Any], request_id: str) -> EngineAnswer:
        """The answer of one of those engines to a request of serve.core.sampling. The model that it names may be one in
        training, which no other request reaches. Raises LineReturned."""
        engines = self._open(model, version)
        if not engines:
            raise LineReturned("no engine of the model is awake", yielded=True)
        busy = [replica_id for _, _, replica_id in self._asking.values()]
        replica_id = min(engines, key=lambda one: (busy.count(one), one))
        content = orjson.dumps({**body, "priority": 2 * BATCH_BEHIND})
        headers = {
            "content-type": "application/json",
            "x-request-id": request_id,
            "x-vllm-priority": str(BATCH_BEHIND),
        }
        if engines[replica_id] not in self._clients:
            await self._close_left()
        client = self._client(engines[replica_id])
        asking = asyncio.create_task(client.post(sampling.URL, content=content, headers=headers))
        self._asking[asking] = model, version, replica_id
        self._sockets[request_id] = engines[replica_id]
        try:
            await asyncio.wait([asking])
        finally:
            del self._asking[asking], self._sockets[request_id]
            asking.cancel()  # no effect once it has ended
        return replace(_answer(asking), version=version)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        """Those of these requests of `sample` that run answer with what they have, as soon as their engine has heard
        it; for one that does not nothing changes."""
        by_socket: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._sockets:
                by_socket.setdefault(self._sockets[request_id], []).append(request_id)
        await asyncio.gather(*(self._interrupt(socket, ids) for socket, ids in by_socket.items()))

    async def _interrupt(self, socket: str, request_ids: list[str]) -> None:
        content, headers = orjson.dumps(sampling.interrupt(request_ids)), {"content-type": "application/json"}
        try:
            await self._client(socket).post(sampling.INTERRUPT_URL, content=content, headers=headers, timeout=CONNECT_S)
        except httpx.TransportError as error:  # an engine that is gone has ended them
            log.info("an engine was not told to interrupt %d rollouts: %s", len(request_ids), error)

    def wants(self, models: list[str]) -> None:
        """These models may be woken if that disturbs nobody, in place of those that were wanted before."""
        if models != self.wanted:
            self.wanted = models
            self._nudge()

    async def changed(self, timeout_s: float) -> None:
        """Returns when `room` may have changed, or after this time."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def load_changed(self) -> None:
        """A gateway reported, or the table changed: recall requests whose engine is wanted for something else."""
        for asking, (model, version, replica_id) in list(self._asking.items()):
            if replica_id not in self._open(model, version):
                asking.cancel()
        self._changed.set()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _open(self, model: str, version: str | None = None) -> dict[str, str]:
        """Replica id to socket of the model's engines that give signs of life; version: of those that serve it."""
        return {
            replica["id"]: replica["socket"]
            for replica in self._bus.models.get(model, {}).get("replicas", ())
            if replica["state"] == OPEN and not replica.get("avoid") and version in (None, replica["version"])
        }

    async def _close_left(self) -> None:
        """Close the connections to engines that have gone: each engine has a socket of its own."""
        there = {replica["socket"] for row in self._bus.models.values() for replica in row.get("replicas", ())}
        for client in [self._clients.pop(socket) for socket in self._clients.keys() - there]:
            await client.aclose()

    def _client(self, socket: str) -> httpx.AsyncClient:
        if socket not in self._clients:
            base_url, options = http_options(socket)
            self._clients[socket] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None), **options),
                base_url=base_url,
                timeout=httpx.Timeout(self._limits.upstream_silence_s, connect=CONNECT_S),
            )
        return self._clients[socket]


def _answer(asking: asyncio.Task[httpx.Response]) -> EngineAnswer:
    """Raises LineReturned."""
    if asking.cancelled():
        raise LineReturned("the engine was wanted for something else", yielded=True)
    failure = asking.exception()
    if isinstance(failure, httpx.ConnectError):
        raise LineReturned(f"the engine is gone: {failure}", yielded=True) from failure
    if isinstance(failure, httpx.ReadTimeout):
        # The engine lives.
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
