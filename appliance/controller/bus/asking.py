"""Asks models through the box's own gateway, for work without a client: batches, background responses, graders,
evaluations, teachers, rollouts.

The gateway's private socket takes the id of a key, so keys, limits, retries and accounting are the gateway's alone. It
never holds a request of its class `batch`: here one waits until an engine of its model is awake and has a place, owners
in fair order, and is sent again where the gateway says so, until whoever asks gives up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import orjson

from appliance.controller.interfaces.errors import error_object
from appliance.controller.interfaces.records import EngineAnswer
from appliance.gateway.core.errors import ENGINE_FAILED, ENGINES_DIED
from appliance.gateway.core.router import FairQueue
from appliance.gateway.core.table import OPEN

CONNECT_S = 5.0
AWAY_RETRY_S = 1.0
QUOTA_RETRY_S = 30.0
"""After a used-up quota, which the gateway refuses without `Retry-After`."""
MOST_RETRY_S = 60.0
UNKNOWN_SLOTS = 16
NOT_AWAKE = "no engine of the model is awake"


class Asker(NamedTuple):
    """key_id: None for the box itself."""

    key_id: str | None
    owner: str


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    asker: Asker
    model: str
    sequences: int
    place: asyncio.Future[None]


class _KeyEnded(Exception):
    pass


class Asking:
    """Invariant: a request is in its host's queue or its sequences count in `_taken`.

    Args:
        transport: to the gateway's private socket.
        table: the models of the routing table.
        host: the model on whose engines a name is served.
        wants_changed: called when `models` has changed.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        table: Callable[[], Mapping[str, Any]],
        host: Callable[[str], str],
        wants_changed: Callable[[], Any],
    ):
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=timeout)
        self._table, self._host, self._wants_changed = table, host, wants_changed
        self._queues: dict[str, FairQueue[_Waiting]] = {}
        self._taken: Counter[str] = Counter()  # by host
        self._wanted: Counter[str] = Counter()
        self._limited: Counter[str | None] = Counter()  # by key: requests that wait for its limits
        self._refusals: dict[tuple[str | None, str], str] = {}  # by key and model

    @property
    def models(self) -> Collection[str]:
        """The models that are asked for."""
        return self._wanted.keys()

    @contextmanager
    def wanted(self, model: str) -> Iterator[None]:
        """The model may be woken meanwhile."""
        self._wanted[model] += 1
        if self._wanted[model] == 1:
            self._wants_changed()
        try:
            yield
        finally:
            self._wanted[model] -= 1
            if not self._wanted[model]:
                del self._wanted[model]
                self._wants_changed()

    def why(self, key_id: str | None, model: str) -> str:
        """Why requests of this key wait; empty: none of them does."""
        row = self._table().get(model)
        return NOT_AWAKE if row is not None and not _places(row) else self._refusals.get((key_id, model), "")

    async def ask(
        self,
        asker: Asker,
        model: str,
        url: str,
        body: Callable[[], Awaitable[dict[str, Any]]],
        request_id: str,
        sequences: int = 1,
    ) -> EngineAnswer:
        """The gateway's answer, but for those that say to come again; 401 where the key has ended. body: called when
        there is a place, again for each attempt; its exceptions are raised. sequences: places that it takes."""
        named, died = (asker.key_id, model), False
        with self.wanted(model):
            try:
                while True:
                    async with self._place(asker, model, sequences):
                        answer, retry_s = await self._post(asker, url, orjson.dumps(await body()), request_id)
                        if _code(answer) == ENGINE_FAILED:
                            if died:
                                answer.body["error"]["code"] = ENGINES_DIED
                            else:
                                died, retry_s = True, AWAY_RETRY_S  # perhaps of another request
                        if retry_s is None:
                            return answer
                        self._refusals[named] = str(answer.body["error"]["message"])
                        if answer.status != 429:
                            await asyncio.sleep(retry_s)  # with its place, so that no other one asks in vain
                    if answer.status == 429:
                        await self._wait_for_limits(asker, retry_s)
            except _KeyEnded:
                message = "The API key that asks has ended."
                return EngineAnswer(401, error_object(message, "invalid_request_error", None, "invalid_api_key"))
            finally:
                self._refusals.pop(named, None)

    def table_changed(self) -> None:
        for host in list(self._queues):
            self._grant(host)

    def end_key(self, key_id: str) -> None:
        """End what waits here of a key that has ended; the gateway ends what engines are at."""
        for waiting in [one for queue in self._queues.values() for one in queue]:
            if waiting.asker.key_id == key_id and not waiting.place.done():
                waiting.place.set_exception(_KeyEnded())

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _place(self, asker: Asker, model: str, sequences: int) -> AsyncIterator[None]:
        """Raises _KeyEnded."""
        host = self._host(model)
        waiting = _Waiting(asker, model, sequences, asyncio.get_running_loop().create_future())
        queue = self._queues.setdefault(host, FairQueue())
        queue.add(asker.owner, waiting, sequences)
        self._grant(host)
        try:
            await waiting.place
            yield
        finally:
            if not queue.discard(asker.owner, waiting):  # it had a place
                self._taken[host] -= sequences
            if not queue and self._queues.get(host) is queue:
                del self._queues[host]
            self._grant(host)

    def _grant(self, host: str) -> None:
        while (waiting := self._next(host)) is not None:
            self._queues[host].take(waiting.asker.owner, waiting)
            self._taken[host] += waiting.sequences
            waiting.place.set_result(None)

    def _next(self, host: str) -> _Waiting | None:
        """The request that is next for a place on this host's engines, if one is free."""
        table = self._table()
        for waiting in self._queues.get(host, ()):
            row = table.get(waiting.model)
            places = 1 if row is None else _places(row)  # of a model that is gone the gateway says so
            if places > self._taken[host] and not waiting.place.done():
                return waiting
            if places and not waiting.place.done():
                return None
        return None

    async def _post(self, asker: Asker, url: str, content: bytes, request_id: str) -> tuple[EngineAnswer, float | None]:
        """The answer, and in how many seconds to send it again; None: it is final."""
        headers = {
            "content-type": "application/json",
            "x-appliance-class": "batch",
            "x-appliance-key-id": asker.key_id or "",
            "x-request-id": request_id,
        }
        try:
            response = await self._client.post(url, content=content, headers=headers)
        except httpx.TransportError as error:
            why = f"The gateway is away: {type(error).__name__} {error}".strip()
            return EngineAnswer(503, error_object(why, "server_error", None, "gateway_away")), AWAY_RETRY_S
        try:
            body = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            message = "The engine's answer is not JSON."
            return EngineAnswer(502, error_object(message, "server_error", None, ENGINE_FAILED)), None
        answer = EngineAnswer(response.status_code, body, response.headers.get("x-appliance-model-version", ""))
        if answer.status not in (429, 503):
            return answer, None
        return answer, float(response.headers.get("retry-after", QUOTA_RETRY_S))

    async def _wait_for_limits(self, asker: Asker, retry_s: float) -> None:
        """The longer the more requests of the key wait, or all of them would come again at once for one that may go."""
        self._limited[asker.key_id] += 1
        try:
            longest_s = max(MOST_RETRY_S, retry_s)
            await asyncio.sleep(min(retry_s * self._limited[asker.key_id] * random.uniform(0.5, 1.5), longest_s))  # noqa: S311
        finally:
            self._limited[asker.key_id] -= 1
            if not self._limited[asker.key_id]:
                del self._limited[asker.key_id]


def _code(answer: EngineAnswer) -> str | None:
    return None if answer.status == 200 else answer.body.get("error", {}).get("code")


def _places(row: Mapping[str, Any]) -> int:
    """How many sequences of class batch a model's engines take at once: half of their slots."""
    engines = sum(replica["state"] == OPEN for replica in row.get("replicas", ()))
    return engines * max(1, (row.get("slots") or UNKNOWN_SLOTS) // 2)
