"""How many requests a model will have soon if they go on growing in number, from the gateways' load reports.

Requests that come and go by chance rise and fall too: over a while in which `a` came and `e` ended, by about
`sqrt(a + e)` (the difference of two Poisson counts). What is within twice that is not counted. Nor do they grow for
ever: as many as come in the time that one lasts are in flight (Little's law), and how long one lasts is learned.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S, LEAST_S = 2.0, 0.4
"""How far back a rise is looked for, and how much of it has to have been seen."""
CHANCE = 2.0
"""Standard deviations."""
MEMORY_S = 1800.0
"""After this long what was seen of how long requests last counts 1/e."""
KNOWN_REQUESTS = 100.0
"""Before so many it is not known how long one lasts."""


class DemandForecast:
    """Of one model. Owned by whoever receives the load reports; `seen` is called with each. ahead_s: how soon."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s
        self._seen: deque[tuple[float, int, int]] = deque()
        self._lasted_s, self._came = 0.0, 0.0

    def seen(self, now_s: float, requests: int, arrived: int) -> None:
        """`requests` are in flight or held at `now_s`; `arrived` came since ever."""
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
        """Requests in flight or held by then where those that came outnumber those that ended and chance; 0 where they
        do not, and until it can be told."""
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
        """Requests that came in a second, of late or in all of the window: what begins is not yet all of it."""
        last_s, _, arrived = self._seen[-1]
        return max((arrived - a) / (last_s - at_s) for at_s, _, a in self._seen if last_s - at_s >= LEAST_S)
