"""Limits requests and tokens per key and minute with token buckets; writes OpenAI's `x-ratelimit-*` headers. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

_MINUTE_S: Final = 60.0


class Bucket:
    """A token bucket: `limit` per minute, refilled evenly, a minute's worth at once; `level` may be negative after a
    request that cost more than estimated. Times by the monotonic clock."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is available; an amount larger than the bucket needs a full one."""
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / _MINUTE_S)
        self._at_s = now_s
        return max(0.0, min(amount, self.limit) - self.level) * _MINUTE_S / self.limit


class Refused(NamedTuple):
    """what: the exhausted bucket, "requests" or "tokens". limit: per minute. wait_s: until there is enough."""

    what: str
    limit: int
    wait_s: float


class Allowance:
    """One key's buckets; None means no limit. A request takes its estimated tokens, and its cost corrects them later.
    limits: of requests and of tokens."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        self.limits = (requests_per_minute, tokens_per_minute)
        named = zip(("requests", "tokens"), self.limits, strict=True)
        self._buckets = {what: Bucket(limit, now_s) for what, limit in named if limit is not None}

    def take(self, requests: int, tokens: int, now_s: float) -> Refused | None:
        """Spend this, or nothing at all; a bucket in debt refuses whatever is taken."""
        for what, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(requests if what == "requests" else tokens, now_s):
                return Refused(what, bucket.limit, wait_s)
        self.spend(requests, tokens)
        return None

    def spend(self, requests: int, tokens: int) -> None:
        """Spend this even if it is not available; a negative number is a refund."""
        for what, bucket in self._buckets.items():
            bucket.level = min(bucket.limit, bucket.level - (requests if what == "requests" else tokens))

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Headers of https://platform.openai.com/docs/guides/rate-limits."""
        fields = []
        for what, bucket in self._buckets.items():
            reset_s = bucket.wait_s(bucket.limit, now_s)
            fields += [
                (b"x-ratelimit-limit-%b" % what.encode(), b"%d" % bucket.limit),
                (b"x-ratelimit-remaining-%b" % what.encode(), b"%d" % max(0, int(bucket.level))),
                (b"x-ratelimit-reset-%b" % what.encode(), duration(reset_s)),
            ]
        return fields


class OwnerUse:
    """Open work of all keys of one owner: requests (streams among them) and bytes of bodies; and the bucket of requests
    that the controller answers. Ten keys do not allow ten times as much."""

    requests: int = 0
    streams: int = 0
    body_bytes: int = 0
    control: Bucket | None = None


class KeyUse:
    """One key's buckets, its owner's open work, and the tokens that its open requests may take. batch: of its requests
    of class batch, else of all others."""

    def __init__(self, owner: OwnerUse, batch: bool = False) -> None:
        self.owner, self.batch = owner, batch
        self.allowance: Allowance | None = None
        self.under_way = 0


def duration(seconds: float) -> bytes:
    """A duration in OpenAI's format: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else f"{round(rest, 2):g}s".encode()
