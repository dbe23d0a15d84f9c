"""Limits what keys and owners spend and have open at one gateway process, and sums up what was spent."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from appliance.gateway.access.request import KeyUse, OwnerUse, Request
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.table import NOBODY, Caller
from appliance.gateway.requests.request_check import Checked
from runtime.moments import minute


class UsageLimits:
    """What all keys spend and may spend at one gateway process.

    events: counters, by name. workers: how many processes share the port; report_spent: reports to the others what a
    key has spent here. callers: by the id of the key.
    """

    def __init__(self, events: defaultdict[str, int], workers: int) -> None:
        self.report_spent: Callable[[str, bool, int, int], None] = lambda key, batch, requests, tokens: None
        self._events = events
        self._workers = workers
        self.callers: dict[str, Caller] = {}
        # By key, owner and class: a key may get another owner, whose open requests it then shares, and class batch has
        # an allowance of its own.
        self._uses: dict[tuple[str, str, bool], KeyUse] = {}
        self._owners: defaultdict[str, OwnerUse] = defaultdict(OwnerUse)
        # By key, model and version.
        self._sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def apply(self, callers: Iterable[Caller]) -> None:
        """Apply a new table: drop the state of removed keys; their open requests keep a reference to it."""
        self.callers = {caller.id: caller for caller in callers}
        self._uses = {name: use for name, use in self._uses.items() if name[0] in self.callers}

    def use_of(self, caller: Caller, *, batch: bool = False) -> KeyUse:
        name = caller.id, caller.owner, batch
        if name not in self._uses:
            self._uses[name] = KeyUse(self._owners[caller.owner], batch)
        use = self._uses[name]
        use.limit(caller.requests_per_minute, caller.tokens_per_minute, time.monotonic())
        return use

    def admit(self, request: Request) -> None:
        """Charge a request to its key, also one whose body is invalid. Raises HttpError 429 past a quota or the
        requests per minute."""
        caller = request.caller
        if caller.spent_until_s is not None and time.time() < caller.spent_until_s:
            self._events["quota_spent"] += 1
            # No Retry-After: the quota renews in hours, and clients should not wait for that.
            used = f"This API key has used up its quota of {caller.spent_quota or 'tokens'}"
            message, code = f"{used}. It is renewed at {minute(caller.spent_until_s)}.", "insufficient_quota"
            raise HttpError(429, message, kind=code, code=code, should_retry=False)
        self._take(request, 1, 0)

    def opened(self, request: Request, checked: Checked, limits: Limits) -> None:
        """Count a request that goes to an engine; `closed` must follow. Raise HttpError 429 unless the key has enough
        tokens and its owner few enough requests and streams."""
        caller, use = request.caller, request.use
        if use.owner.requests >= limits.owner_requests:
            raise self.too_many_at_once("requests", limits.owner_requests)
        if checked.stream and use.owner.streams >= limits.owner_streams:
            raise self.too_many_at_once("streams", limits.owner_streams)
        # A request's cost is known at its end: open requests together stay within the quota, but one alone may pass it.
        quota = None if caller.quota is None else max(1, caller.quota // self._workers)
        if quota is not None and use.under_way and use.under_way + checked.tokens > quota:
            self._events["concurrency_limited"] += 1
            message = (
                f"Open requests of this API key may take {use.under_way} tokens, and this one {checked.tokens}; its "
                f"quota allows {quota} at once. Please retry when one has ended."
            )
            raise errors.over_limit(message, "tokens", 1)
        self._take(request, 0, checked.tokens)
        request.counted, request.streams = True, checked.stream
        request.charged, request.prompt_tokens = checked.tokens, checked.prompt_tokens
        self._count(request, 1)

    def closed(self, request: Request) -> None:
        request.counted = False
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        use = request.use
        use.under_way += sign * request.charged
        use.owner.requests += sign
        use.owner.streams += sign * request.streams

    def too_many_at_once(self, things: str, limit: int) -> HttpError:
        self._events["concurrency_limited"] += 1
        return errors.over_limit(
            f"Your API keys have {limit} {things} open, the most at once. Please retry.", "requests", 1
        )

    def _take(self, request: Request, requests: int, tokens: int) -> None:
        """Raises HttpError 429."""
        if not request.use.buckets:
            return
        now_s = time.monotonic()
        refused = request.use.take(requests, tokens, now_s)
        request.rate_headers = request.use.headers(now_s)
        if refused is not None:
            self._events["rate_limited"] += 1
            name, limit, wait_s = refused
            message = f"Rate limit reached: {limit} {name} per minute. Please try again in {wait_s:.3g}s."
            raise errors.over_limit(message, name, wait_s)
        self.report_spent(request.caller.id, request.use.batch, requests, tokens)

    def spent_elsewhere(self, key: str, batch: bool, requests: int, tokens: int) -> None:
        """Another process of this port reports what a key has spent there."""
        if key in self.callers:
            self.use_of(self.callers[key], batch=batch).spend(requests, tokens)

    def account(self, request: Request) -> None:
        """Charge an inference request's cost to its key's limits and to the sums for the controller."""
        caller, tokens = request.caller, request.tokens
        if not tokens.completion and request.sent_s and request.status in (200, 401, 499):
            # No usage came: the client left, its key was revoked, or the engine died in mid-stream.
            tokens.prompt = tokens.prompt or request.prompt_tokens
            tokens.completion = request.stream_events
        self._correct(request, 0, tokens.prompt + tokens.completion - request.charged)
        used = {"prompt_tokens": tokens.prompt, "completion_tokens": tokens.completion}
        sums = self._sums[caller.id, request.model, request.model_version]
        sums.update(requests=1, errors=int(request.status >= 500 or request.broke_off), **used)

    def refund(self, request: Request) -> None:
        """Give back what a request of class batch has spent that gives way and is sent again."""
        self._correct(request, -1, -request.charged)

    def _correct(self, request: Request, requests: int, tokens: int) -> None:
        if request.use.buckets:
            request.use.spend(requests, tokens)
            self.report_spent(request.caller.id, request.use.batch, requests, tokens)

    def refused(self, request: Request) -> None:
        """Count a request that was not forwarded: over a limit, without permission, or invalid."""
        if request.caller is not NOBODY:
            self._sums[request.caller.id, request.refused_model, ""]["refused"] += 1

    def take_sums(self) -> list[dict[str, Any]]:
        """The sums since the last call, as rows of the bus's "usage" message."""
        sums, self._sums = self._sums, defaultdict(Counter)
        names = ("requests", "errors", "refused", "prompt_tokens", "completion_tokens")
        return [
            {"key": key, "model": model, "version": version, **{name: row[name] for name in names}}
            for (key, model, version), row in sums.items()
        ]
