"""What one key may spend: token buckets by the minute, and OpenAI's `x-ratelimit-*` headers. Pure."""

from __future__ import annotations

from typing import Final

_MINUTE_S: Final = 60.0


class Bucket:
    """`limit` per minute, refilled evenly, a minute's worth at once; `level` may be negative after a request that cost
    more than estimated."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is available; an amount larger than the bucket needs a full one."""
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / _MINUTE_S)
        self._at_s = now_s
        return max(0.0, min(amount, self.limit) - self.level) * _MINUTE_S / self.limit


class OwnerUse:
    """Open work of all keys of one owner: requests (streams among them) and bytes of bodies. Ten keys do not allow ten
    times as much."""

    requests: int = 0
    streams: int = 0
    body_bytes: int = 0


class KeyUse:
    """One key's requests of class batch, or all others of it: the buckets of its limits, its owner's open work, and the
    tokens that its open requests may take. A request takes its estimated tokens, and its cost corrects them later."""

    def __init__(self, owner: OwnerUse, batch: bool = False) -> None:
        self.owner, self.batch = owner, batch
        self.under_way = 0
        self.buckets: dict[str, Bucket] = {}
        self._limits: tuple[int | None, int | None] = (None, None)

    def limit(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        """None: no limit. Other limits than before begin with full buckets."""
        limits = requests_per_minute, tokens_per_minute
        if limits != self._limits:
            self._limits = limits
            named = zip(("requests", "tokens"), limits, strict=True)
            self.buckets = {what: Bucket(limit, now_s) for what, limit in named if limit is not None}

    def take(self, requests: int, tokens: int, now_s: float) -> tuple[str, int, float] | None:
        """Spend this, or nothing at all. Returns the exhausted bucket's name, limit and seconds to wait; a bucket in
        debt refuses whatever is taken."""
        for what, bucket in self.buckets.items():
            if wait_s := bucket.wait_s(requests if what == "requests" else tokens, now_s):
                return what, bucket.limit, wait_s
        self.spend(requests, tokens)
        return None

    def spend(self, requests: int, tokens: int) -> None:
        """Spend this even if it is not available; a negative number is a refund."""
        for what, bucket in self.buckets.items():
            bucket.level = min(bucket.limit, bucket.level - (requests if what == "requests" else tokens))

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Headers of https://platform.openai.com/docs/guides/rate-limits."""
        fields = []
        for what, bucket in self.buckets.items():
            reset = duration(bucket.wait_s(bucket.limit, now_s))
            values = {"limit": b"%d" % bucket.limit, "remaining": b"%d" % max(0, int(bucket.level)), "reset": reset}
            fields += [(f"x-ratelimit-{name}-{what}".encode(), value) for name, value in values.items()]
        return fields


def duration(seconds: float) -> bytes:
    """A duration in OpenAI's format: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else f"{round(rest, 2):g}s".encode()
