"""Tracks what keys spend: requests and tokens per minute, quotas, what owners have open, and sums of usage."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from appliance.gateway.access.allowance import Allowance, Bucket, KeyUse, OwnerUse
from appliance.gateway.access.request import Request
from appliance.gateway.answers.usage import Meter
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import ADMIN
from appliance.gateway.payload.request_check import Checked
from appliance.gateway.routing.table import Caller

LOGINS_PER_MINUTE: Final = 100
"""From one address. More than a person needs: those behind a proxy come from its address."""
_ADDRESSES: Final = 1024


class Spending:
    """Spending of all keys at one gateway process. events: counters, by name. workers: how many processes share the
    port. tell_others: sends them what a key has spent here (`heard`). callers: by the id of the key."""

    def __init__(self, events: defaultdict[str, int], workers: int) -> None:
        self.meter = Meter()
        self.tell_others: Callable[[str, bool, int, int], None] = lambda key, batch, requests, tokens: None
        self._events = events
        self._workers = workers
        self.callers: dict[str, Caller] = {}
        # By the key's id, and whether it is class batch, which has an allowance of its own.
        self._uses: dict[tuple[str, bool], KeyUse] = {}
        self._owners: dict[str, OwnerUse] = {}
        # By address, the one that asked longest ago first.
        self._logins: dict[str, Bucket] = {}

    def apply(self, callers: Iterable[Caller]) -> None:
        """Apply a new table: drop the state of removed keys and of owners without any; their open requests keep a
        reference to it."""
        self.callers = {caller.id: caller for caller in callers}
        owners = {caller.id: caller.owner for caller in self.callers.values()}
        self._uses = {
            (key, batch): use
            for (key, batch), use in self._uses.items()
            if key in owners and self._owners.get(owners[key]) is use.owner
        }
        live = set(owners.values())
        self._owners = {owner: use for owner, use in self._owners.items() if owner in live}

    def use_of(self, caller: Caller, *, batch: bool = False) -> KeyUse:
        use = self._uses.get((caller.id, batch))
        if use is None:
            of_owner = self._owners.setdefault(caller.owner, OwnerUse())
            use = self._uses[caller.id, batch] = KeyUse(of_owner, batch)
        return use

    # -- before the body is looked at

    def admit(self, request: Request, limits: Limits) -> None:
        """Raise HttpError unless the key has quota left, is within its requests per minute and its owner has few enough
        open.

        Spends the request: one with an invalid body counts too."""
        caller, use = request.caller, request.use
        assert caller is not None and use is not None
        spent_until_s = caller.spent_until_s
        if spent_until_s is not None and time.time() < spent_until_s:
            self._events["quota_spent"] += 1
            raise errors.quota_spent(spent_until_s, caller.spent_quota)
        self._check_open(use.owner, 1, limits)
        use.allowance = self._allowance(caller, use)
        self._take(request, 1, 0)

    def admit_control(self, caller: Caller, use: KeyUse, limits: Limits) -> None:
        """Count a request that the controller answers. Raises HttpError 429. An administrator's are not counted."""
        if ADMIN in caller.scopes:
            return
        limit, now_s, bucket = limits.owner_control_requests_per_minute, time.monotonic(), use.owner.control
        if bucket is None or bucket.limit != limit:
            bucket = use.owner.control = Bucket(limit, now_s)
        if wait_s := bucket.wait_s(1, now_s):
            self._events["control_limited"] += 1
            raise errors.rate_limited("requests to control routes", limit, wait_s)
        bucket.level -= 1

    def opened_control(self, request: Request, limits: Limits) -> None:
        """Count a request to the controller as open for its owner, because the answer may take long (events of a
        background response), or raise HttpError 429. `closed` must follow. An administrator's are not counted."""
        assert request.caller is not None and request.use is not None
        if ADMIN not in request.caller.scopes:
            self._check_open(request.use.owner, 1, limits)
            request.use.owner.requests += 1
            request.counted = True

    def admit_login(self, address: str) -> None:
        """Count a request to a login provider's routes, which come without a key. Raises HttpError 503."""
        now_s = time.monotonic()
        bucket = self._logins.pop(address, Bucket(LOGINS_PER_MINUTE, now_s))
        self._logins[address] = bucket
        if len(self._logins) > _ADDRESSES:
            del self._logins[next(iter(self._logins))]
        if wait_s := bucket.wait_s(1, now_s):
            self._events["login_limited"] += 1
            raise errors.unavailable("Too many logins at once. Please retry.", "too_many_logins", math.ceil(wait_s))
        bucket.level -= 1

    # -- when it is known what it asks for

    def opened(self, request: Request, checked: Checked, limits: Limits) -> None:
        """Count a request that goes to an engine; `closed` must follow. Raise HttpError unless the key has enough
        tokens and its owner few enough requests and streams."""
        caller, use = request.caller, request.use
        assert caller is not None and use is not None
        # Again: many may have been admitted while the controller fetched their previous responses.
        self._check_open(use.owner, checked.weight, limits)
        if checked.stream and use.owner.streams >= limits.owner_streams:
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("streams", limits.owner_streams)
        # What it costs is known only at its end: all that a key had open at once went past its quota. One alone may.
        quota = None if caller.quota is None else max(1, caller.quota // self._workers)
        if quota is not None and use.under_way and use.under_way + checked.tokens > quota:
            self._events["concurrency_limited"] += 1
            raise errors.too_much_of_a_quota(use.under_way, checked.tokens, quota)
        if use.allowance is not None:
            self._take(request, 0, checked.tokens)
            request.estimated_tokens = checked.tokens
        request.counted, request.streams, request.weight = True, checked.stream, checked.weight
        request.under_way, request.asked = checked.tokens, checked.asked
        use.under_way += checked.tokens
        use.owner.requests += checked.weight
        use.owner.streams += checked.stream

    def closed(self, request: Request) -> None:
        use = request.use
        assert use is not None
        request.counted = False
        use.owner.requests -= request.weight
        use.owner.streams -= request.streams
        use.under_way -= request.under_way

    def _check_open(self, owner: OwnerUse, weight: int, limits: Limits) -> None:
        if owner.requests + min(weight, limits.owner_requests) > limits.owner_requests:
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("requests", limits.owner_requests)

    # -- a key's limits by the minute

    def _allowance(self, caller: Caller, use: KeyUse) -> Allowance | None:
        limits = (caller.requests_per_minute, caller.tokens_per_minute)
        if limits == (None, None):
            return None
        if use.allowance is None or use.allowance.limits != limits:
            return Allowance(*limits, time.monotonic())
        return use.allowance

    def _take(self, request: Request, requests: int, tokens: int) -> None:
        """Raises HttpError 429."""
        caller, use = request.caller, request.use
        assert caller is not None and use is not None
        if use.allowance is None:
            return
        now_s = time.monotonic()
        refused = use.allowance.take(requests, tokens, now_s)
        request.rate_headers = use.allowance.headers(now_s)
        if refused is not None:
            self._events["rate_limited"] += 1
            raise errors.rate_limited(*refused)
        self.tell_others(caller.id, use.batch, requests, tokens)

    def heard(self, key: str, batch: bool, requests: int, tokens: int) -> None:
        """Another process of this port says that a key has spent this there."""
        caller = self.callers.get(key)
        if caller is not None:
            use = self.use_of(caller, batch=batch)
            use.allowance = self._allowance(caller, use)
            if use.allowance is not None:
                use.allowance.spend(requests, tokens)

    # -- when it is over

    def account(self, request: Request, now_s: float) -> None:
        """Charge an inference request's cost to its key's allowance and to the sums for the controller."""
        caller, use, tokens, expected = request.caller, request.use, request.tokens, request.asked
        if caller is None or not request.model:
            return
        left = request.left_after_s > 0
        if left or (not tokens.total and request.status == 200 and request.first_byte_s):
            # No engine reports the cost: the client left, its key was revoked, or the engine died in mid-stream. Charge
            # the prompt and the events that were delivered.
            tokens.prompt = tokens.prompt or expected.prompt_tokens
            tokens.completion = max(tokens.completion, min(request.stream_events, expected.completion_tokens))
        if request.estimated_tokens and use is not None and use.allowance is not None:
            cost = tokens.total
            if not cost and 400 <= request.status < 500 and request.sent_s:
                # An engine has read it and refused it, as too long for instance.
                cost = min(expected.prompt_tokens, request.estimated_tokens)
            use.allowance.spend(0, cost - request.estimated_tokens)
            self.tell_others(caller.id, use.batch, 0, cost - request.estimated_tokens)
        self.meter.add(caller.id, request.model, request.model_version, tokens, request.status >= 500)

    def gave_way(self, request: Request) -> None:
        """Give back what a request of class batch has spent that comes again."""
        caller, use = request.caller, request.use
        if caller is not None and use is not None and use.allowance is not None:
            use.allowance.spend(-1, -request.estimated_tokens)
            self.tell_others(caller.id, use.batch, -1, -request.estimated_tokens)

    def refused(self, request: Request) -> None:
        """Count a request that was not forwarded: over a limit, without permission, or invalid."""
        if request.caller is not None:
            self.meter.refuse(request.caller.id, request.refused_model)
