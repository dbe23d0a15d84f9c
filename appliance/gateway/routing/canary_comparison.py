"""Counts a model's requests by version while one of its versions is a canary.

Times are counted in buckets a quarter of a power of two wide, so that a 95th percentile of all gateways together is
known to 19 %: the bounds that the controller compares with are far wider (1.5 x).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from appliance.gateway.routing.table import Model

SHORTEST_S = 0.001
BUCKETS_PER_DOUBLING = 4


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Bucket i ends at least * 2 ** (i / BUCKETS_PER_DOUBLING)."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


class Comparison:
    """Every attempt counts for the version it was sent to, so a request that fails on the canary and succeeds on the
    other version is an error of the canary, and so is a refusal. Clients that leave count for none.

    canaries: {model: {"since_s", "versions": {version: {"requests", "errors", "first_byte", "duration"}}}}, the last
    two numbers of successful requests by bucket of their time from sending, as the load report has them.
    """

    def __init__(self) -> None:
        self.canaries: dict[str, dict[str, Any]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        before, self.canaries = self.canaries, {}
        for model in models:
            if model.canary is not None:
                new = {"since_s": model.canary.since_s, "versions": {}}
                known = before.get(model.name, new)
                self.canaries[model.name] = known if known["since_s"] == new["since_s"] else new

    def add(self, model: str, version: str, *, failed: bool, first_byte_s: float | None, duration_s: float) -> None:
        """Count a finished attempt. first_byte_s: None where its times say nothing."""
        if model not in self.canaries:
            return
        new = {"requests": 0, "errors": 0, "first_byte": Counter[int](), "duration": Counter[int]()}
        counts = self.canaries[model]["versions"].setdefault(version, new)
        counts["requests"] += 1
        counts["errors"] += failed
        if not failed and first_byte_s is not None:
            counts["first_byte"][bucket(first_byte_s)] += 1
            counts["duration"][bucket(duration_s)] += 1
