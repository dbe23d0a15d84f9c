"""Requests of the box's own work through its gateway: batches, background responses, graders, evaluations, teachers,
rollouts.

The gateway's private socket accepts the id of a key, so only the gateway handles keys, limits, waiting, retries and
accounting. A temporarily refused request, such as a `batch` request whose engine drains, is sent again until the caller
gives up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from appliance.controller.interfaces.errors import error_object
from appliance.gateway.core.errors import ENGINE_FAILED
from appliance.gateway.core.table import OPEN
from appliance.store import keys
from appliance.store.database import Database
from appliance.store.rows import new_id

CONNECT_S = 5.0
AWAY_RETRY_S = 1.0
QUOTA_RETRY_S = 30.0  # for a used-up quota, which the gateway refuses without `Retry-After`
NOT_AWAKE = "no engine of the model is awake"
Body = dict[str, Any] | Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An answer of an engine or the gateway. body: its JSON."""

    status: int
    body: Any

    @property
    def error(self) -> str:
        """The message of an error; empty for a successful answer."""
        if self.status == 200:
            return ""
        return str(self._error.get("message") or f"The request failed with status {self.status}.")

    @property
    def code(self) -> str | None:
        return None if self.status == 200 else self._error.get("code")

    @property
    def _error(self) -> dict[str, Any]:
        return (self.body.get("error") if isinstance(self.body, dict) else None) or {}


class Asking:
    """Sends the requests of the box's own work, and repeats those that the gateway refuses temporarily.

    Args:
        transport: to the gateway's private socket.
        table: the models of the routing table.
        wants_changed: called when `models` has changed.
    """

    def __init__(
        self,
        db: Database,
        transport: httpx.AsyncBaseTransport,
        table: Callable[[], Mapping[str, Any]],
        wants_changed: Callable[[], Any],
    ):
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=timeout)
        self._db, self._table, self._wants_changed = db, table, wants_changed
        self._wanted: Counter[str] = Counter()
        self._refusals: dict[tuple[str | None, str], str] = {}  # {(key, model): …}

    @property
    def models(self) -> Collection[str]:
        """Models with pending requests, which the scheduler may therefore wake."""
        return self._wanted.keys()

    def why(self, key_id: str | None, model: str) -> str:
        """Return why requests of this key wait; empty if none waits."""
        row = self._table().get(model)
        asleep = row is not None and all(replica["state"] != OPEN for replica in row.get("replicas", ()))
        return NOT_AWAKE if asleep else self._refusals.get((key_id, model), "")

    async def ask(
        self,
        key_id: str | None,
        model: str,
        url: str,
        body: Body,
        *,
        request_id: str = "",
        within_s: float | None = None,
    ) -> EngineAnswer:
        """Send a request until the gateway's answer is final.

        Args:
            key_id: key on whose behalf it is sent; None: the box itself, which has no limits. body: the body, or a
            function that makes it for each attempt and whose exceptions are raised. within_s: seconds after which the
            answer is a 504.
        """
        request_id = request_id or new_id("req_")
        self._wanted[model] += 1
        if self._wanted[model] == 1:
            self._wants_changed()
        try:
            async with asyncio.timeout(within_s):
                while True:
                    content = orjson.dumps(body if isinstance(body, dict) else await body())
                    answer, retry_s = await self._post(key_id, url, content, request_id)
                    if retry_s is None:
                        return answer
                    self._refusals[key_id, model] = answer.error
                    # Wait a random time, so that the requests of a key do not all return at once.
                    await asyncio.sleep(retry_s * random.uniform(1, 3))  # noqa: S311
        except TimeoutError:
            why = f"no answer within {within_s:.0f} s: {self.why(key_id, model) or 'its engines are busy'}"
            return EngineAnswer(504, error_object(why, "server_error", None, "timeout"))
        finally:
            self._refusals.pop((key_id, model), None)
            self._wanted[model] -= 1
            if not self._wanted[model]:
                del self._wanted[model]
                self._wants_changed()

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(
        self, key_id: str | None, url: str, content: bytes, request_id: str
    ) -> tuple[EngineAnswer, float | None]:
        """Return the answer, and the seconds to wait before a retry; None: the answer is final."""
        headers = {
            "content-type": "application/json",
            "x-appliance-class": "batch",
            "x-appliance-key-id": key_id or "",
            "x-request-id": request_id,
        }
        try:
            response = await self._client.post(url, content=content, headers=headers)
        except httpx.TransportError as error:
            why = f"The gateway is away: {type(error).__name__} {error}".strip()
            return EngineAnswer(503, error_object(why, "server_error", None, "gateway_away")), AWAY_RETRY_S
        try:
            body = await asyncio.to_thread(orjson.loads, response.content)
        except orjson.JSONDecodeError:
            message = "The engine's answer is not JSON."
            return EngineAnswer(502, error_object(message, "server_error", None, ENGINE_FAILED)), None
        answer = EngineAnswer(response.status_code, body)
        if answer.status == 401 and not keys.how_ended(self._db, key_id):  # the gateway does not know the key yet
            return answer, AWAY_RETRY_S
        if answer.status not in (429, 503):
            return answer, None
        return answer, float(response.headers.get("retry-after", QUOTA_RETRY_S))
