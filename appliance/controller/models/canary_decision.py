"""Decides whether a canary is promoted, rolled back or watched further: a pure function of what both versions answered.

Errors are tested at every look, by Fisher's exact test at a level far below the usual 5 %, because there are many
looks. Times are compared once it was watched long enough, so that an engine's first slow requests do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from appliance.controller.bus.load import VersionLoad
from appliance.gateway.access.load import BUCKETS_PER_DOUBLING, SHORTEST_S
from appliance.store.rows import CanaryRow

ERROR_CHANCE = 0.001
"""Roll back when chance would produce as many canary errors less often than this."""
SLOWER_FACTOR = 1.5
SLOWER_SLACK_S = 0.005
"""How much higher the 95th percentile may be than the other version's: a factor, and seconds of tolerance."""


class Decision(NamedTuple):
    verdict: Literal["wait", "promote", "roll back"]
    reason: str


def decide(row: CanaryRow, new: VersionLoad, old: VersionLoad, now_s: float) -> Decision:
    """new, old: counts of the canary and of the version before it. The first rule that finds something decides."""
    sides = ((row.version, new), (row.before, old))
    counts = ", ".join(f"{name} failed {load.errors} of {load.requests} requests" for name, load in sides)
    if _chance_of_errors(new, old) < ERROR_CHANCE:
        return Decision("roll back", counts)
    for name, load in sides:
        if load.requests < row.min_requests:
            return Decision("wait", f"{name} answered {load.requests} of {row.min_requests} requests")
    if (left_s := row.created_s + row.watch_s - now_s) > 0:
        return Decision("wait", f"watched for {math.ceil(left_s)} s more")
    for what, its, usual in (
        ("time to first byte", p95_s(new.first_byte), p95_s(old.first_byte)),
        ("duration", p95_s(new.duration), p95_s(old.duration)),
    ):
        if its is not None and usual is not None and its > SLOWER_FACTOR * usual + SLOWER_SLACK_S:
            whose = f"{its:.3g} s with {row.version}, {usual:.3g} s with {row.before}"
            return Decision("roll back", f"the 95th percentile of the {what} is {whose}")
    return Decision("promote", f"{row.version} is as good as {row.before}: {counts}")


def p95_s(counts: Mapping[int, int]) -> float | None:
    """95th percentile of times counted in buckets (s): the upper end of its bucket. None without any."""
    total, seen = sum(counts.values()), 0
    for index in sorted(counts):
        seen += counts[index]
        if seen and seen >= 0.95 * total:
            return SHORTEST_S * 2 ** (index / BUCKETS_PER_DOUBLING)
    return None


def _chance_of_errors(new: VersionLoad, old: VersionLoad) -> float:
    if not new.errors or not old.requests:
        return 1.0
    from scipy.stats import fisher_exact  # takes a second, of boxes with a failing canary alone

    table = [[load.errors, load.requests - load.errors] for load in (new, old)]
    return float(fisher_exact(table, alternative="greater").pvalue)
