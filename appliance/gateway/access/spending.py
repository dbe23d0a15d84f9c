"""Tracks what keys spend: requests and tokens per minute, quotas, and sums of usage for the controller."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from appliance.gateway.access.allowance import Allowance, Bucket, KeyUse, OwnerUse, Refused
from appliance.gateway.access.request import Request
from appliance.gateway.answers.usage import Meter
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import ADMIN
from appliance.gateway.payload.request_check import Checked
from appliance.gateway.routing.table import Caller

LOGINS_PER_MINUTE: Final = 300
"""What one worker takes, from everybody together."""
LOGINS_PER_MINUTE_OF_ONE: Final = 100
"""What one address takes, so that a stranger who asks without end does not keep all others from logging in. More than a
person needs: those behind a proxy come from its address."""
_ADDRESSES: Final = 1024


class Spending:
    """Spending of all keys at one gateway. events: counters, by name; workers: how many gateways share each key's
    limits."""

    def __init__(self, events: defaultdict[str, int], workers: int) -> None:
        self.meter = Meter()
        self._events = events
        self._workers = workers
        self._uses: dict[str, KeyUse] = {}
        self._owners: dict[str, OwnerUse] = {}
        self._logins = Bucket(LOGINS_PER_MINUTE, time.monotonic())
        # By address, the one that asked longest ago first.
        self._logins_of: dict[str, Bucket] = {}

    def apply(self, callers: Iterable[Caller]) -> None:
        """Apply a new table: drop the state of removed keys and of owners without any; their open requests keep a
        reference to it."""
        owners = {caller.id: caller.owner for caller in callers}
        self._uses = {
            key: use for key, use in self._uses.items() if key in owners and self._owners.get(owners[key]) is use.owner
        }
        live = set(owners.values())
        self._owners = {owner: use for owner, use in self._owners.items() if owner in live}

    def use_of(self, caller: Caller) -> KeyUse:
        use = self._uses.get(caller.id)
        if use is None:
            of_owner = self._owners.get(caller.owner)
            if of_owner is None:
                of_owner = self._owners[caller.owner] = OwnerUse()
            use = self._uses[caller.id] = KeyUse(of_owner)
        return use

    # -- before the body is looked at

    def admit(self, request: Request, use: KeyUse, limits: Limits) -> None:
        """Raise HttpError unless the key has quota left, is within its requests per minute and its owner has few enough
        open.

        Spends the request: one with an invalid body counts too."""
        caller = request.caller
        assert caller is not None
        spent_until_s = caller.spent_until_s
        if spent_until_s is not None and time.time() < spent_until_s:
            self._events["quota_spent"] += 1
            raise errors.quota_spent(spent_until_s, caller.spent_quota)
        if use.owner.requests >= limits.owner_requests:
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("requests", limits.owner_requests)
        allowance = self._allowance(caller, use)
        if allowance is not None:
            refused = allowance.take_request(time.monotonic())
            request.rate_headers = allowance.headers()
            if refused is not None:
                self._events["rate_limited"] += 1
                raise self._rate_limited(caller, refused)

    def admit_control(self, caller: Caller, use: KeyUse, limits: Limits) -> None:
        """Count a request that the controller answers. Raises HttpError 429. An administrator's are not counted."""
        limit = limits.owner_control_requests_per_minute
        if ADMIN in caller.scopes:
            return
        now_s = time.monotonic()
        bucket = use.owner.control
        if bucket is None or bucket.limit != limit:
            bucket = use.owner.control = Bucket(limit, now_s)
        bucket.refill(now_s)
        wait_s = bucket.wait_s(1)
        if wait_s > 0:
            self._events["control_limited"] += 1
            raise errors.rate_limited("requests to control routes", limit, wait_s)
        bucket.level -= 1

    def opened_control(self, request: Request, caller: Caller, use: KeyUse, limits: Limits) -> None:
        """Count a request to the controller as open for its owner, because the answer may take long (events of a
        background response), or raise HttpError 429. `closed` must follow. An administrator's are not counted."""
        if ADMIN in caller.scopes:
            return
        if use.owner.requests >= limits.owner_requests:
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("requests", limits.owner_requests)
        use.owner.requests += 1
        request.counted = True

    def admit_login(self, address: str) -> None:
        """Count a request to a login provider's routes, which come without a key. Raises HttpError 503."""
        now_s = time.monotonic()
        own = self._logins_of.pop(address, None) or Bucket(LOGINS_PER_MINUTE_OF_ONE, now_s)
        self._logins_of[address] = own
        while len(self._logins_of) > _ADDRESSES:
            del self._logins_of[next(iter(self._logins_of))]
        wait_s = 0.0
        for bucket in (own, self._logins):
            bucket.refill(now_s)
            wait_s = max(wait_s, bucket.wait_s(1))
        if wait_s > 0:
            self._events["login_limited"] += 1
            raise errors.unavailable("Too many logins at once. Please retry.", "too_many_logins", math.ceil(wait_s))
        own.level -= 1
        self._logins.level -= 1

    # -- when it is known what it asks for

    def spend(self, request: Request, checked: Checked, limits: Limits) -> None:
        """Raise HttpError unless the key has enough tokens and its owner few enough streams."""
        use = request.use
        assert use is not None
        if use.owner.requests + min(checked.weight, limits.owner_requests) > limits.owner_requests:
            # Check again: many may have been admitted while the controller fetched their previous responses.
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("requests", limits.owner_requests)
        if checked.stream and use.owner.streams >= limits.owner_streams:
            self._events["concurrency_limited"] += 1
            raise errors.too_many_at_once("streams", limits.owner_streams)
        caller = request.caller
        quota = None if caller is None or caller.quota is None else max(1, caller.quota // self._workers)
        # What it costs is known only at its end: all that a key had open at once went past its quota. One alone may.
        if quota is not None and use.under_way and use.under_way + checked.tokens > quota:
            self._events["concurrency_limited"] += 1
            raise errors.too_much_of_a_quota(use.under_way, checked.tokens, quota)
        allowance = use.allowance
        if allowance is not None:
            refused = allowance.take_tokens(checked.tokens, time.monotonic())
            request.rate_headers = allowance.headers()
            if refused is not None:
                self._events["rate_limited"] += 1
                raise self._rate_limited(caller, refused)
            request.estimated_tokens = checked.tokens

    def opened(self, request: Request, checked: Checked) -> None:
        """Count a request that was sent; `closed` must follow."""
        use = request.use
        assert use is not None
        use.owner.requests += checked.weight
        use.under_way += checked.tokens
        request.under_way = checked.tokens
        request.counted = True
        request.weight = checked.weight
        request.asked = checked.asked
        if checked.stream:
            request.streams = True
            use.owner.streams += 1

    def closed(self, request: Request) -> None:
        use = request.use
        assert use is not None
        request.counted = False
        use.owner.requests -= request.weight
        use.under_way -= request.under_way
        if request.streams:
            use.owner.streams -= 1

    def _rate_limited(self, caller: Caller | None, refused: Refused) -> errors.HttpError:
        """Names the key's own limit: a worker's part of it is a number that nobody has set."""
        assert caller is not None
        whole = caller.requests_per_minute if refused.what == "requests" else caller.tokens_per_minute
        if whole is None or whole == refused.limit:
            return errors.rate_limited(*refused)
        part = f", {refused.limit} of them at this one of the box's {self._workers} gateway processes"
        return errors.rate_limited(refused.what, whole, refused.wait_s, part)

    def _allowance(self, caller: Caller, use: KeyUse) -> Allowance | None:
        requests, tokens = caller.requests_per_minute, caller.tokens_per_minute
        if requests is None and tokens is None:
            use.allowance = None
            return None
        # Connections spread over the workers of one port, and so do a key's requests.
        workers = self._workers
        requests = None if requests is None else max(1, requests // workers)
        tokens = None if tokens is None else max(1, tokens // workers)
        allowance = use.allowance
        if allowance is None or allowance.limits != (requests, tokens):
            allowance = use.allowance = Allowance(requests, tokens, time.monotonic())
        return allowance

    # -- when it is over

    def account(self, request: Request, now_s: float) -> None:
        """Charge an inference request's cost to its key's allowance and to the sums for the controller."""
        caller, tokens = request.caller, request.tokens
        if caller is None or not request.model:
            return
        expected = request.asked
        left = request.left_after_s > 0
        if left or (not tokens.total and request.status == 200 and request.sent_bytes):
            # No engine reports the cost: the client left, its key was revoked, or the engine died in mid-stream. Charge
            # the prompt and the events that were delivered.
            tokens.prompt = tokens.prompt or expected.prompt_tokens
            tokens.completion = max(tokens.completion, min(request.stream_events, expected.completion_tokens))
        # Last: it is no part of what the answer's engine tells, or takes.
        tokens.prompt += request.refused_prompt
        tokens.completion += request.refused_completion
        if request.estimated_tokens:
            use = request.use
            if use is not None and use.allowance is not None:
                cost = tokens.total
                if not cost and 400 <= request.status < 500 and request.sent_s:
                    # An engine has read it and refused it, as too long for instance.
                    cost = min(expected.prompt_tokens, request.estimated_tokens)
                use.allowance.correct(request.estimated_tokens, cost)
        self.meter.add(caller.id, request.model, request.model_version, tokens, request.status >= 500)

    def refused(self, request: Request) -> None:
        """Count a request that was not forwarded: over a limit, without permission, or invalid."""
        caller = request.caller
        if caller is not None:
            self.meter.refuse(caller.id, request.refused_model)
