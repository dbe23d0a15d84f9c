"""Applies a key's limits to its batches and its responses in background: models, quota and per-minute limits apply as
to a direct request.

A direct request over a limit is refused, because its client can retry; a line waits here, as long as its batch has
time, and so does a response in background. Both have buckets of their own: a batch does not slow down direct requests
of the same key. The controller has one Metering, so that all work that waits for a key's limits shares one allowance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from appliance.controller.access.model_access import may_use
from appliance.controller.access.spending import Spending, quota_of
from appliance.controller.batches.answers import tokens_of
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.controller.interfaces.principal import INFERENCE, allow
from appliance.gateway.access.allowance import Allowance
from appliance.gateway.answers.usage import TokenRequest
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.readings.media import media_in
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import BatchRow, KeyRow
from runtime.moments import minute

# Per request, to estimate its cost before an engine reports it.
BYTES_PER_TOKEN = 4
_UNBOUNDED = 1 << 20
_OF_NO_LENGTH = 4096
"""Tokens that count against a quota while an answer of unknown length is written."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One line that has its answer. estimated: tokens charged to its key's allowance when it was sent.
    silent: the line, if its engine has not answered in time."""

    custom_id: str
    answer: EngineAnswer
    estimated: int
    silent: Sent | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A line that an engine is processing. size: of its body, in bytes."""

    url: str
    body: dict[str, Any]
    size: int


class Metering:
    """Meters batches, responses in background and models that grade. `changed` republishes the keys when a quota was
    used up."""

    def __init__(self, db: Database, changed: Callable[[], None]):
        self._db, self._spending = db, Spending(db, changed)
        self._allowances: dict[str, Allowance] = {}
        self._at_engines: dict[str, dict[str, dict[str, int]]] = {}  # by key, asker and line: tokens that it may cost

    def key_of(self, batch: BatchRow) -> KeyRow | None:
        """Returns None for a batch of the box itself, which has no limits."""
        return keys.find(self._db, batch.key_id) if batch.key_id is not None else None

    def refusal(
        self, key: KeyRow | None, model: str, expires_s: float, *, needs_scope: bool = True
    ) -> EngineAnswer | None:
        """The answer that lines with time until `expires_s` get instead of an engine's; None if they may be sent, once
        `waits_for` allows it. needs_scope: a job asks the model that it trains without the scope of inference."""
        if key is None:
            return None
        if needs_scope and not allow(key.scopes, INFERENCE):
            return _answer(gateway_errors.missing_scope(INFERENCE))
        if not may_use(self._db, key.id, model):
            return _answer(gateway_errors.model_not_found(model))
        quota = quota_of(self._db, key, time.time())
        if quota.spent_until_s is not None and quota.spent_until_s >= expires_s:
            return _answer(gateway_errors.quota_spent(quota.spent_until_s, quota.spent))
        return None

    def waits_for(
        self, key: KeyRow | None, tokens: int, asker: str = "", line: str = "", asked: Callable[[], int] = lambda: 0
    ) -> str:
        """Why a line of this many tokens may not go now; empty if it may, and then the allowance is charged for it.

        asked: what it may cost at most, which counts against its key's quota from then on until `returned`. (Its cost
        is known only at its end: without this, all lines at engines together went past the quota. One alone may.)"""
        if key is None:
            return ""
        left, until_s, spent = quota_of(self._db, key, time.time())
        if until_s is not None:
            return f"its key's quota of {spent} is used up until {minute(until_s)}"
        most = 0
        if left is not None:
            most = asked()
            under_way = sum(sum(lines.values()) for lines in self._at_engines.get(key.id, {}).values())
            if under_way and under_way + most > left:
                return (
                    f"what engines are at may cost {under_way:,} of the {left:,} tokens that its key's quota has left"
                )
        refused = self._allowance(key).take(1, tokens, time.monotonic())
        if refused:
            return f"its key may spend {refused.limit} {refused.what} per minute"
        if left is not None:
            self._at_engines.setdefault(key.id, {}).setdefault(asker, {})[line] = most
        return ""

    def returned(self, key_id: str | None, asker: str, line: str | None = None) -> None:
        """No engine works on it any more, or on any line of its asker. Call this however it ends, after it was charged
        if it is."""
        askers = self._at_engines.get(key_id or "", {})
        if line is not None:
            askers.get(asker, {}).pop(line, None)
        if line is None or not askers.get(asker):
            askers.pop(asker, None)
        if not askers:
            self._at_engines.pop(key_id or "", None)

    def give_back(self, key: KeyRow | None, tokens: int) -> None:
        """Give back what `waits_for` charged for a line that its engine returned unanswered: it will be charged
        again."""
        if key is not None:
            self._allowance(key).spend(0, -tokens)

    def charge(self, key: KeyRow | None, model: str, answered: list[Charge]) -> None:
        """Count answers as the gateways do: by key, model and version."""
        rows = []
        for charge in answered:
            answer, prompt, completion = charge.answer, 0, 0
            if charge.silent is not None:
                (row,) = self.left("", model, [charge.silent])
                prompt, completion = row["prompt_tokens"], row["completion_tokens"]
            elif answer.status == 200:
                used = tokens_of(answer.body)
                prompt, completion = used.get("input_tokens", 0), used.get("output_tokens", 0)
            if key is not None:
                self._allowance(key).spend(0, prompt + completion - charge.estimated)
            key_id, failed = key.id if key is not None else "", answer.status >= 500
            rows.append(spent_by(key_id, model, answer.version, prompt, completion, failed=failed))
        self.pay(rows)

    def pay(self, rows: list[dict[str, Any]]) -> None:
        """Raises sqlite3.Error if they cannot be written now; the next call then writes them too."""
        if rows:
            self._spending.take(rows)

    def left(self, key_id: str, model: str, lines: list[Sent]) -> list[dict[str, Any]]:
        """For `pay`: lines that their owner cancelled, or whose key was revoked, while engines processed them.

        No engine reports their cost: charge the estimated prompt."""
        rows = []
        for line in lines:
            # The body is not checked again: for the lines of eight engines that took the loop seven seconds.
            request = asked_of(line.url, line.body, line.size)
            rows.append(spent_by(key_id, model, "", request.prompt_tokens, 0))
        return rows

    def _allowance(self, key: KeyRow) -> Allowance:
        limits = (key.requests_per_minute, key.tokens_per_minute)
        found = self._allowances.get(key.id)
        if found is None or found.limits != limits:
            found = self._allowances[key.id] = Allowance(*limits, time.monotonic())
        return found


def spent_by(
    key_id: str, model: str, version: str, prompt_tokens: int, completion_tokens: int, *, failed: bool = False
) -> dict[str, Any]:
    """One request, as `Metering.pay` takes it. key_id: "" for the box itself."""
    return {
        "key": key_id,
        "model": model,
        "version": version,
        "requests": 1,
        "errors": int(failed),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }


def asked_of(url: str, body: dict[str, Any], size: int) -> TokenRequest:
    """As `check_body(...).asked` of a body of `size` bytes that has passed it; at most that for a body that has not."""
    prompt = body.get("prompt")
    several = url == "/v1/completions" and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    sequences = (len(prompt) if several else 1) * max(_count(body, "n"), _count(body, "best_of"))
    named = (_count(body, name, 0) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    most = next((tokens for tokens in named if tokens), _UNBOUNDED)
    media_chars, media_tokens = media_in(body.get("messages") or body.get("input"))
    size = max(0, size - media_chars)
    return TokenRequest(
        size // BYTES_PER_TOKEN + media_tokens, 0 if url == "/v1/embeddings" else most * sequences, sequences
    )


def most_of(url: str, body: dict[str, Any], size: int) -> int:
    """Tokens that it may cost, prompt and answer."""
    request = asked_of(url, body, size)
    unsaid = request.completion_tokens >= _UNBOUNDED * request.sequences
    return request.prompt_tokens + (_OF_NO_LENGTH * request.sequences if unsaid else request.completion_tokens)


def _count(body: dict[str, Any], name: str, otherwise: int = 1) -> int:
    given = body.get(name)
    return given if type(given) is int and 0 < given <= _UNBOUNDED else otherwise


def _answer(error: gateway_errors.HttpError) -> EngineAnswer:
    return EngineAnswer(error.status, orjson.loads(error.body()))
