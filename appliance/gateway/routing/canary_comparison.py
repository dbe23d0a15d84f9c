"""Counts a model's requests by version while one of its versions is a canary.

Times are counted in buckets a quarter of a power of two wide, so that a 95th percentile of all gateways together is
known to 19 %: the bounds that the controller compares with are far wider (1.5 x).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from appliance.gateway.routing.table import Canary, Model

SHORTEST_S = 0.001
BUCKETS_PER_DOUBLING = 4


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Bucket i ends at least * 2 ** (i / BUCKETS_PER_DOUBLING)."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


@dataclass(slots=True)
class _Owner:
    """Requests of one owner. first_byte, duration: successful ones by bucket of their time."""

    requests: int = 0
    errors: int = 0
    first_byte: Counter[int] = field(default_factory=Counter)
    duration: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class _Version:
    """Counts by owner. refused: requests that this version refused and the other one answered."""

    owners: defaultdict[str, _Owner] = field(default_factory=lambda: defaultdict(_Owner))
    refused: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        return {
            "asked": {owner: [counts.requests, counts.errors] for owner, counts in self.owners.items()},
            "refused": dict(self.refused),
            "owners": {
                owner: {"first_byte": _by_text(counts.first_byte), "duration": _by_text(counts.duration)}
                for owner, counts in self.owners.items()
                if counts.duration
            },
        }


class Comparison:
    """Counts per model and version. Every attempt counts for the version it was sent to, so a request that fails on the
    canary and succeeds on the other version is an error of the canary.

    Clients that disconnect count for no version, nor do requests that are refused for their own fault: otherwise a
    client could have a canary promoted with requests that no version answers. Requests that only the canary refused are
    counted separately."""

    def __init__(self) -> None:
        self._canaries: dict[str, Canary] = {}
        self._counts: dict[str, defaultdict[str, _Version]] = {}

    @property
    def compares(self) -> bool:
        return bool(self._canaries)

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        now = {model.name: model.canary for model in models if model.canary is not None}
        self._counts = {
            name: self._counts[name] if _same(self._canaries.get(name), canary) else defaultdict(_Version)
            for name, canary in now.items()
        }
        self._canaries = now

    def add(
        self, model: str, version: str, owner: str, *, failed: bool, first_byte_s: float | None, duration_s: float
    ) -> None:
        """Count a finished attempt, and its times from sending if it succeeded.

        By owner, because a client can have one version write long answers and the other short ones. first_byte_s: None
        where its times say nothing."""
        if model not in self._counts:
            return
        counts = self._counts[model][version].owners[owner]
        counts.requests += 1
        counts.errors += failed
        if not failed and first_byte_s is not None:
            counts.first_byte[bucket(first_byte_s)] += 1
            counts.duration[bucket(duration_s)] += 1

    def refused(self, model: str, version: str, owner: str) -> None:
        """Count a request that this version refused and the other one has answered."""
        if model in self._counts:
            self._counts[model][version].refused[owner] += 1

    def report(self) -> dict[str, Any]:
        """{model: {"since_s", "versions": {version: {"asked": {owner: [requests, errors]}, "refused": {owner: number},
        "owners": {owner: {"first_byte", "duration"}}}}}}, the last two numbers of requests by bucket."""
        return {
            name: {
                "since_s": self._canaries[name].since_s,
                "versions": {version: counts.report() for version, counts in versions.items()},
            }
            for name, versions in self._counts.items()
        }

    def rows(self) -> Iterable[tuple[dict[str, str], int, int]]:
        """(labels, requests, errors) for the metrics."""
        for name, versions in self._counts.items():
            for version, counts in versions.items():
                owners = counts.owners.values()
                labels = {"model": name, "version": version}
                yield labels, sum(one.requests for one in owners), sum(one.errors for one in owners)


def _by_text(counts: Counter[int]) -> dict[str, int]:
    return {str(key): number for key, number in counts.items()}


def _same(before: Canary | None, now: Canary) -> bool:
    # Its share may change while it runs.
    return before is not None and (before.name, before.since_s) == (now.name, now.since_s)
