"""Limits requests and tokens per key and minute with token buckets; writes OpenAI's `x-ratelimit-*` headers. Pure.

A bucket holds one minute's allowance and refills evenly, so an idle key may spend it at once. A request takes its
estimated tokens on arrival, and its actual cost corrects them later.
"""

from __future__ import annotations

from typing import NamedTuple

MINUTE_S = 60.0


class Refused(NamedTuple):
    """What ran out ("requests" or "tokens"), its limit per minute, and in how many seconds there is enough."""

    what: str
    limit: int
    wait_s: float


class Bucket:
    """`limit` per minute; `level` may be negative after a request that cost more than estimated."""

    __slots__ = ("limit", "level", "_at_s")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def refill(self, now_s: float) -> None:
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / MINUTE_S)
        self._at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is available; an amount larger than the bucket needs a full one."""
        return max(0.0, min(amount, self.limit) - self.level) * MINUTE_S / self.limit


class Allowance:
    """One key's buckets; None means no limit."""

    __slots__ = ("limits", "_requests", "_tokens")

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        self.limits = (requests_per_minute, tokens_per_minute)
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute, now_s)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute, now_s)

    def take(self, tokens: int, now_s: float) -> Refused | None:
        """Spend one request and this many tokens, or nothing at all."""
        for what, bucket, amount in (("requests", self._requests, 1), ("tokens", self._tokens, tokens)):
            if bucket is not None:
                bucket.refill(now_s)
                wait_s = bucket.wait_s(amount)
                if wait_s > 0:
                    return Refused(what, bucket.limit, wait_s)
        if self._requests is not None:
            self._requests.level -= 1
        if self._tokens is not None:
            self._tokens.level -= tokens
        return None

    def take_request(self, now_s: float) -> Refused | None:
        """Spend one request before its body is read; nothing if the token bucket is negative."""
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                bucket.refill(now_s)
                wait_s = bucket.wait_s(1)
                if wait_s > 0:
                    return Refused(what, bucket.limit, wait_s)
        if self._requests is not None:
            self._requests.level -= 1
        return None

    def take_tokens(self, tokens: int, now_s: float) -> Refused | None:
        """Spend this many tokens, or none."""
        bucket = self._tokens
        if bucket is None:
            return None
        bucket.refill(now_s)
        wait_s = bucket.wait_s(tokens)
        if wait_s > 0:
            return Refused("tokens", bucket.limit, wait_s)
        bucket.level -= tokens
        return None

    def correct(self, estimated: int, actual: int) -> None:
        """Correct the bucket: a request estimated at `estimated` tokens has cost `actual`."""
        if self._tokens is not None:
            self._tokens.level = min(self._tokens.limit, self._tokens.level + estimated - actual)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of https://platform.openai.com/docs/guides/rate-limits, as of the last `take`."""
        found = []
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-%b" % what, b"%d" % bucket.limit),
                    (b"x-ratelimit-remaining-%b" % what, b"%d" % max(0, int(bucket.level))),
                    (b"x-ratelimit-reset-%b" % what, duration(bucket.wait_s(bucket.limit))),
                ]
        return found


class OwnerUse:
    """What all keys of one owner have open at this gateway: requests (including streams) and the bytes of their bodies;
    and the bucket of requests that the controller answers. Ten keys do not allow ten times as much."""

    requests: int = 0
    streams: int = 0
    body_bytes: int = 0

    def __init__(self) -> None:
        self.control: Bucket | None = None


class KeyUse:
    """The buckets of one key's own limits, what its owner has open, and how many tokens its open requests may take."""

    def __init__(self, owner: OwnerUse) -> None:
        self.owner = owner
        self.allowance: Allowance | None = None
        self.under_way = 0


def duration(seconds: float) -> bytes:
    """A duration in OpenAI's format: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else f"{round(rest, 2):g}s".encode()
