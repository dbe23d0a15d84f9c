"""Records how many replicas a model's load needed in the last half hour, and the floor that would have sufficed.

Kept as buckets of time; each holds, per number of replicas b, how much demand exceeded b. Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKET_S = 300.0
BUCKETS = 6


@dataclass(frozen=True, slots=True)
class Bucket:
    """Begins at `begun_s`. asked: replicas needed times seconds. over[b]: the part of it beyond b replicas."""

    begun_s: float
    asked: float = 0.0
    over: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """`want` replicas have been needed since `since_s`; earlier need is in `buckets`, oldest first."""

    since_s: float = 0.0
    want: int = 0
    buckets: tuple[Bucket, ...] = ()

    def seen(self, want: int, now_s: float) -> RecentLoad:
        """Account for the time up to now; from now on `want` replicas are needed."""
        passed_s = min(now_s - self.since_s, BUCKET_S)
        buckets = self.buckets
        if self.want and passed_s > 0:
            if not buckets or now_s - buckets[-1].begun_s >= BUCKET_S:
                buckets = (*buckets, Bucket(now_s - passed_s))
            last = buckets[-1]
            size = max(len(last.over), self.want)
            over = tuple(
                (last.over[b] if b < len(last.over) else 0.0) + passed_s * max(self.want - b, 0) for b in range(size)
            )
            buckets = (*buckets[:-1], Bucket(last.begun_s, last.asked + passed_s * self.want, over))
        oldest_s = now_s - BUCKETS * BUCKET_S
        if buckets and buckets[0].begun_s < oldest_s:
            buckets = tuple(b for b in buckets if b.begun_s >= oldest_s)
        return RecentLoad(now_s, want, buckets)

    def floor(self, tolerance: float) -> int:
        """The fewest replicas such that at most this share of the demand exceeded them."""
        allowed = tolerance * sum(b.asked for b in self.buckets)
        most = max((len(b.over) for b in self.buckets), default=0)
        for count in range(most):
            if sum(b.over[count] for b in self.buckets if count < len(b.over)) <= allowed:
                return count
        return most
