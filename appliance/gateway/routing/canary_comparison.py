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
class _Counts:
    """Requests of one owner to one version. first_byte, duration: successful ones by bucket of their time."""

    requests: int = 0
    errors: int = 0
    first_byte: Counter[int] = field(default_factory=Counter)
    duration: Counter[int] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        times = {"first_byte": self.first_byte, "duration": self.duration}
        by_bucket = {name: {str(key): number for key, number in counts.items()} for name, counts in times.items()}
        return {"requests": self.requests, "errors": self.errors, **by_bucket}


class Comparison:
    """Counts per model, version and owner. Every attempt counts for the version it was sent to, so a request that fails
    on the canary and succeeds on the other version is an error of the canary. A refusal counts as an error of whichever
    version refused: a request at fault itself is as likely to come to either. Clients that leave count for none."""

    def __init__(self) -> None:
        self._canaries: dict[str, Canary] = {}
        self._counts: dict[str, defaultdict[str, defaultdict[str, _Counts]]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        before, self._canaries = self._canaries, {model.name: model.canary for model in models if model.canary}
        self._counts = {
            name: self._counts[name]
            # Its share may change while it runs.
            if (old := before.get(name)) and (old.name, old.since_s) == (canary.name, canary.since_s)
            else defaultdict(lambda: defaultdict(_Counts))
            for name, canary in self._canaries.items()
        }

    def add(
        self, model: str, version: str, owner: str, *, failed: bool, first_byte_s: float | None, duration_s: float
    ) -> None:
        """Count a finished attempt, and its times from sending if it succeeded.

        By owner, because a client can have one version write long answers and the other short ones. first_byte_s: None
        where its times say nothing."""
        if model not in self._counts:
            return
        counts = self._counts[model][version][owner]
        counts.requests += 1
        counts.errors += failed
        if not failed and first_byte_s is not None:
            counts.first_byte[bucket(first_byte_s)] += 1
            counts.duration[bucket(duration_s)] += 1

    def report(self) -> dict[str, Any]:
        """{model: {"since_s", "versions": {version: {owner: {"requests", "errors", "first_byte", "duration"}}}}}, the
        last two numbers of requests by bucket."""
        return {
            name: {
                "since_s": self._canaries[name].since_s,
                "versions": {
                    version: {owner: counts.report() for owner, counts in owners.items()}
                    for version, owners in versions.items()
                },
            }
            for name, versions in self._counts.items()
        }
