"""Forecasts how many requests a model will have soon if their number keeps rising, from the gateways' load reports.

Random arrivals and departures fluctuate too: over a period with `a` arrivals and `e` ends, by about `sqrt(a + e)` (the
difference of two Poisson counts). A rise within twice that is not counted. Growth is also bounded: in flight are as
many as arrive during one request's duration (Little's law), and that duration is learned.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S, LEAST_S = 2.0, 0.4
"""How far back to look for a rise, and how much of that must have been observed."""
CHANCE = 2.0
"""Standard deviations."""
MEMORY_S = 1800.0
"""Time constant of forgetting request durations: after this long an observation counts 1/e."""
KNOWN_REQUESTS = 100.0
"""Minimum number of requests before their duration counts as known."""


class DemandForecast:
    """The forecast for one model. It is owned by the receiver of the load reports, which calls `seen` for each.
    ahead_s: how far ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s
        self._seen: deque[tuple[float, int, int]] = deque()
        self._lasted_s, self._came = 0.0, 0.0

    def seen(self, now_s: float, requests: int, arrived: int) -> None:
        """`requests` are in flight or held at `now_s`; `arrived` is the cumulative count."""
        if self._seen:
            last_s, before, arrived_before = self._seen[-1]
            fade = math.exp(-(now_s - last_s) / MEMORY_S)
            self._lasted_s = self._lasted_s * fade + (now_s - last_s) * (before + requests) / 2
            self._came = self._came * fade + arrived - arrived_before
        self._seen.append((now_s, requests, arrived))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def expected(self) -> float:
        """Requests in flight or held at that time, if arrivals outnumber ends by more than chance; 0 otherwise, and
        until there is enough data."""
        if not self._seen:
            return 0.0
        (first_s, before, arrived_before), (last_s, now, arrived) = self._seen[0], self._seen[-1]
        passed_s, rise = last_s - first_s, now - before
        if passed_s < LEAST_S or rise <= 0:
            return 0.0
        came = max(arrived - arrived_before, rise)
        certain = rise - CHANCE * math.sqrt(2 * came - rise)
        if certain <= 0:
            return 0.0
        most = math.inf
        if self._came >= KNOWN_REQUESTS:
            most = self._most_per_s() * self._lasted_s / self._came
        return max(now, min(now + self._ahead_s * certain / passed_s, most))

    def _most_per_s(self) -> float:
        """Arrivals per second, recently or over the whole window: a starting rise is not yet fully visible."""
        last_s, _, arrived = self._seen[-1]
        return max((arrived - a) / (last_s - at_s) for at_s, _, a in self._seen if last_s - at_s >= LEAST_S)
