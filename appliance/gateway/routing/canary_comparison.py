"""Counts a model's requests by version while one of its versions is a canary.

Times are counted in buckets a quarter of a power of two wide, so that a 95th percentile of all gateways together is
known to 19 %: the bounds that the controller compares with are far wider (1.5 x).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.gateway.routing.router import Canary, Model

SHORTEST_S = 0.001
BUCKETS_PER_DOUBLING = 4


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Bucket i ends at least * 2 ** (i / BUCKETS_PER_DOUBLING)."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


class _Times:
    """first_byte, duration: how many requests by bucket of their time."""

    __slots__ = ("first_byte", "duration")

    def __init__(self) -> None:
        self.first_byte: defaultdict[int, int] = defaultdict(int)
        self.duration: defaultdict[int, int] = defaultdict(int)

    def report(self) -> dict[str, dict[str, int]]:
        return {
            name: {str(key): number for key, number in counts.items()}
            for name, counts in (("first_byte", self.first_byte), ("duration", self.duration))
        }


class _Version:
    """asked: by owner, how many requests and how many of them failed. refused: how many it refused besides, which the
    other version then answered."""

    __slots__ = ("owners", "asked", "refused")

    def __init__(self) -> None:
        self.owners: defaultdict[str, _Times] = defaultdict(_Times)
        self.asked: dict[str, tuple[int, int]] = {}
        self.refused: defaultdict[str, int] = defaultdict(int)


class Comparison:
    """Every attempt of a request counts for the version it was sent to, so a request that fails on the canary and
    succeeds on the other version is an error of the canary. Clients that disconnect count for no version, nor do
    requests that are refused for their own fault: otherwise somebody could have a canary promoted with requests that no
    version answers. Requests that only the canary refused are counted separately."""

    def __init__(self) -> None:
        self.compares = False
        self._canaries: dict[str, Canary] = {}
        self._counts: dict[str, dict[str, _Version]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        now = {model.name: model.canary for model in models if model.canary is not None}
        self._counts = {
            name: self._counts[name] if _same(self._canaries.get(name), canary) else {} for name, canary in now.items()
        }
        self._canaries = now
        self.compares = bool(now)

    def add(
        self, model: str, version: str, owner: str, *, failed: bool, first_byte_s: float | None, duration_s: float
    ) -> None:
        """Count a finished attempt; record times from sending for successful ones, by owner: a client can have one
        version write long answers, and the other short ones. first_byte_s: None too where its times say nothing."""
        versions = self._counts.get(model)
        if versions is None:
            return
        counts = versions.setdefault(version, _Version())
        requests, errors = counts.asked.get(owner, (0, 0))
        counts.asked[owner] = requests + 1, errors + failed
        if not failed and first_byte_s is not None:
            times = counts.owners[owner]
            times.first_byte[bucket(first_byte_s)] += 1
            times.duration[bucket(duration_s)] += 1

    def refused(self, model: str, version: str, owner: str) -> None:
        """Count a request that this version refused and the other one has answered."""
        versions = self._counts.get(model)
        if versions is not None:
            versions.setdefault(version, _Version()).refused[owner] += 1

    def report(self) -> dict[str, dict[str, int]]:
        return {
            name: {str(key): number for key, number in counts.items()}
            for name, counts in (("first_byte", self.first_byte), ("duration", self.duration))
        }


class _Version:
    """asked: by owner, how many requests and how many of them failed. refused: how many it refused besides, which the
    other version then answered."""

    __slots__ = ("owners", "asked", "refused")

    def __init__(self) -> None:
        self.owners: defaultdict[str, _Times] = defaultdict(_Times)
        self.asked: dict[str, tuple[int, int]] = {}
        self.refused: defaultdict[str, int] = defaultdict(int)


class Comparison:
    """Every attempt of a request counts for the version it was sent to, so a request that fails on the canary and
    succeeds on the other version is an error of the canary. Clients that disconnect count for no version, nor do
    requests that are refused for their own fault: otherwise somebody could have a canary promoted with requests that no
    version answers. Requests that only the canary refused are counted separately."""

    def __init__(self) -> None:
        self.compares = False
        self._canaries: dict[str, Canary] = {}
        self._counts: dict[str, dict[str, _Version]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        now = {model.name: model.canary for model in models if model.canary is not None}
        self._counts = {
            name: self._counts[name] if _same(self._canaries.get(name), canary) else {} for name, canary in now.items()
        }
        self._canaries = now
        self.compares = bool(now)

    def add(
        self, model: str, version: str, owner: str, *, failed: bool, first_byte_s: float | None, duration_s: float
    ) -> None:
        """Count a finished attempt; record times from sending for successful ones, by owner: a client can have one
        version write long answers, and the other short ones. first_byte_s: None too where its times say nothing."""
        versions = self._counts.get(model)
        if versions is None:
            return
        counts = versions.setdefault(version, _Version())
        requests, errors = counts.asked.get(owner, (0, 0))
        counts.asked[owner] = requests + 1, errors + failed
        if not failed and first_byte_s is not None:
            times = counts.owners[owner]
            times.first_byte[bucket(first_byte_s)] += 1
            times.duration[bucket(duration_s)] += 1

    def refused(self, model: str, version: str, owner: str) -> None:
        """Count a request that this version refused and the other one has answered."""
        versions = self._counts.get(model)
        if versions is not None:
            versions.setdefault(version, _Version()).refused[owner] += 1

    def few(self, model: str, by_canary: bool) -> int:
        """How many requests of one owner are no crowd for others on an engine of this version: of a few together, as
        many as its share. On two cores, four long answers at the canary and none at the other version had others wait
        1.75 times as long there."""
        canary = self._canaries.get(model)
        share = 1.0 if canary is None else canary.share if by_canary else 1 - canary.share
        return max(1, round(FEW * share))

    def report(self) -> Mapping[str, Any]:
        """{model: {"since_s", "versions": {version: {"asked": {owner: [requests, errors]}, "refused": {owner: number},
        "owners": {owner: {"first_byte", "duration"}}}}}}, the last two numbers of requests by bucket."""
        return {
            name: {
                "since_s": self._canaries[name].since_s,
                "versions": {
                    version: {
                        "asked": {owner: list(counted) for owner, counted in counts.asked.items()},
                        "refused": dict(counts.refused),
                        "owners": {owner: times.report() for owner, times in counts.owners.items()},
                    }
                    for version, counts in versions.items()
                },
            }
            for name, versions in self._counts.items()
        }

    def rows(self) -> Iterable[tuple[dict[str, str], int, int]]:
        """(labels, requests, errors) for the metrics."""
        for name, versions in self._counts.items():
            for version, counts in versions.items():
                requests, errors = (sum(counted[i] for counted in counts.asked.values()) for i in (0, 1))
                yield {"model": name, "version": version}, requests, errors


def _same(before: Canary | None, now: Canary) -> bool:
    # Its share may change while it runs.
    return before is not None and (before.name, before.since_s) == (now.name, now.since_s)
