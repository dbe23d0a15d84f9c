"""Rate limits and quotas of keys, limits on the open requests of owners, and sums of usage."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.table import Caller
from runtime.logs import minute

_MINUTE_S: Final = 60.0


class Bucket:
    """A token bucket: refills at `limit` per minute and holds at most `limit`. `level` is negative after a request that
    used more than estimated."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit, self.level, self._at_s = limit, float(limit), now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is available; for an amount above `limit`, until the bucket is full."""
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / _MINUTE_S)
        self._at_s = now_s
        return max(0.0, min(amount, self.limit) - self.level) * _MINUTE_S / self.limit


class OwnerUse:
    """Open work of one class, summed over all keys of one owner, so that an owner gains nothing from more keys."""

    requests: int = 0
    body_bytes: int = 0


class KeyUse:
    """Spending of one key in one class. under_way: estimated tokens of open requests. A request takes its
    estimate from the buckets at its start; at its end the buckets are corrected to its real usage."""

    def __init__(self, owner: OwnerUse, batch: bool = False) -> None:
        self.owner, self.batch, self.under_way = owner, batch, 0
        self.buckets: dict[str, Bucket] = {}

    def limit(self, caller: Caller, now_s: float) -> None:
        """Set the buckets for the key's limits; a changed limit starts with a full bucket."""
        before, self.buckets = self.buckets, {}
        for name, limit in (("requests", caller.requests_per_minute), ("tokens", caller.tokens_per_minute)):
            if limit is not None:
                same = name in before and before[name].limit == limit
                self.buckets[name] = before[name] if same else Bucket(limit, now_s)

    def take(self, requests: int, tokens: int) -> None:
        """Spend both amounts, or raise HttpError 429 if one is not available. A negative level refuses 0 too."""
        for name, bucket in self.buckets.items():
            if wait_s := bucket.wait_s(requests if name == "requests" else tokens, time.monotonic()):
                message = f"Rate limit reached: {bucket.limit} {name} per minute. Please try again in {wait_s:.3g}s."
                raise errors.over_limit(message, name, wait_s)
        self.spend(requests, tokens)

    def spend(self, requests: int, tokens: int) -> None:
        """Spend both amounts even if they are not available; negative amounts are refunds."""
        for name, bucket in self.buckets.items():
            bucket.level = min(bucket.limit, bucket.level - (requests if name == "requests" else tokens))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the rate-limit headers of https://platform.openai.com/docs/guides/rate-limits."""
        return [
            (f"x-ratelimit-{field}-{name}".encode(), b"%d" % value)
            for name, bucket in self.buckets.items()
            for field, value in (("limit", bucket.limit), ("remaining", max(0, int(bucket.level))))
        ]


class UsageLimits:
    """Spending and limits of all keys. callers: the table's rows by key id."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}
        # By key, owner and class: a key can move to another owner and then shares that owner's limits; class batch has
        # its own limits.
        self._uses: dict[tuple[str, str, bool], KeyUse] = {}
        self._owners: defaultdict[tuple[str, bool], OwnerUse] = defaultdict(OwnerUse)
        # Usage sums by key, model and version.
        self._sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def apply(self, callers: Iterable[Caller]) -> None:
        """Apply a new table and drop the state of removed keys; open requests keep a reference to their state."""
        self.callers = {caller.id: caller for caller in callers}
        self._uses = {name: use for name, use in self._uses.items() if name[0] in self.callers}
        for (key, _, _), use in self._uses.items():
            use.limit(self.callers[key], time.monotonic())

    def use_of(self, caller: Caller, *, batch: bool = False) -> KeyUse:
        name = caller.id, caller.owner, batch
        if (use := self._uses.get(name)) is None:
            use = self._uses[name] = KeyUse(self._owners[caller.owner, batch], batch)
            use.limit(caller, time.monotonic())
        return use

    def admit(self, caller: Caller, use: KeyUse) -> None:
        """Charge a request to its key before its body is checked. Raises HttpError 429 when a quota or the requests per
        minute are used up."""
        if caller.spent_until_s is not None and time.time() < caller.spent_until_s:
            # No Retry-After: the quota renews in hours, too long for a client to wait.
            used = f"This API key has used up its quota of {caller.spent_quota or 'tokens'}"
            message, code = f"{used}. It is renewed at {minute(caller.spent_until_s)}.", "insufficient_quota"
            raise HttpError(429, message, kind=code, code=code, should_retry=False)
        use.take(1, 0)

    def opened(self, caller: Caller, use: KeyUse, tokens: int, most_requests: int) -> None:
        """Count a request that goes to an engine, with its estimated tokens, as open. Raises HttpError 429 if the key
        has too few tokens left or its owner too many open requests."""
        if use.owner.requests >= most_requests:
            raise self.too_many_at_once("requests", most_requests)
        # Usage is known only at the end, so a single request may exceed the quota, but open requests together may not.
        if caller.quota is not None and use.under_way and use.under_way + tokens > caller.quota:
            message = f"Open requests of this API key may use {use.under_way} tokens, this one {tokens} more; its quota"
            raise errors.over_limit(f"{message} allows {caller.quota} at once. Please retry.", "tokens", 1)
        use.take(0, tokens)
        use.under_way += tokens
        use.owner.requests += 1

    def too_many_at_once(self, things: str, limit: int) -> HttpError:
        message = f"Your API keys have {limit} {things} open, which is the limit. Please retry."
        return errors.over_limit(message, "requests", 1)

    def count(self, key: str, model: str, version: str, counts: dict[str, int]) -> None:
        """Add counts of a key's request to the usage sums that go to the controller."""
        self._sums[key, model, version].update(counts)

    def take_sums(self) -> list[dict[str, Any]]:
        """Return the sums since the last call as rows of the bus's "usage" message."""
        sums, self._sums = self._sums, defaultdict(Counter)
        names = ("requests", "errors", "refused", "prompt_tokens", "completion_tokens")
        return [
            {"key": key, "model": model, "version": version, **{name: row[name] for name in names}}
            for (key, model, version), row in sums.items()
        ]
