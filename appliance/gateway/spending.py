"""What keys spend: requests and tokens by the minute, quotas, and the sums of usage for the controller."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from . import errors
from .allowance import Allowance
from .request_check import Checked
from .table import Principal
from .usage import Meter
from .wire import Request


class Spending:
    """Of all keys at one gateway. events: counters, by name; workers: how many gateways share each key's limits."""

    def __init__(self, events: defaultdict[str, int], workers: int) -> None:
        self.meter = Meter()
        self._events = events
        self._workers = workers
        self._allowances: dict[str, Allowance] = {}

    def apply(self, owners: Iterable[Principal]) -> None:
        """A new table: the allowances of keys that left it are forgotten."""
        live = {owner.id for owner in owners}
        self._allowances = {key: allowance for key, allowance in self._allowances.items() if key in live}

    def spend(self, request: Request, checked: Checked) -> None:
        """Its key may call this model, has quota left and keeps to its limits by the minute, or ApiError is raised."""
        principal = request.principal
        assert principal is not None
        if not principal.may_use(checked.model):
            raise errors.model_not_found(checked.model)
        spent_until_s = principal.spent_until_s
        if spent_until_s is not None and time.time() < spent_until_s:
            self._events["quota_spent"] += 1
            raise errors.quota_spent(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(spent_until_s)))
        allowance = self._allowance(principal)
        if allowance is not None:
            refused = allowance.take(checked.tokens, time.monotonic())
            request.rate_headers = allowance.headers()
            if refused is not None:
                self._events["rate_limited"] += 1
                raise errors.rate_limited(*refused)
            request.estimated_tokens = checked.tokens

    def _allowance(self, principal: Principal) -> Allowance | None:
        requests, tokens = principal.requests_per_minute, principal.tokens_per_minute
        if requests is None and tokens is None:
            return None
        # Connections spread over the workers of one port, and so do a key's requests.
        workers = self._workers
        requests = None if requests is None else max(1, requests // workers)
        tokens = None if tokens is None else max(1, tokens // workers)
        allowance = self._allowances.get(principal.id)
        if allowance is None or allowance.limits != (requests, tokens):
            allowance = self._allowances[principal.id] = Allowance(requests, tokens, time.monotonic())
        return allowance

    def account(self, request: Request) -> None:
        """What an inference request has cost: to its key's allowance, and to the sums for the controller."""
        principal, tokens = request.principal, request.tokens
        if principal is None or not request.model:
            return
        if not tokens.total and request.status in (200, 499) and request.sent_bytes:
            # Left before its end: no engine has said what it cost.
            tokens.prompt, tokens.completion = request.body_bytes // 4, request.stream_events
        if request.estimated_tokens:
            allowance = self._allowances.get(principal.id)
            if allowance is not None:
                allowance.correct(request.estimated_tokens, tokens.total)
        self.meter.add(principal.id, request.model, request.model_version, tokens, request.status >= 500)
