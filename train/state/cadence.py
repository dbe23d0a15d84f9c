"""When the next snapshot of a running job is due: as often as it is cheap.

What a snapshot costs is measured: how long training stood still for it and how much processor time was spent beside
training, on copying and on making room. So often that this is 2 % of the time, and not more often than every 5 s; that
loses less than half a minute of work as long as a snapshot costs up to 0.6 s. A dearer one is taken less often, down to
every 300 s. `snapshot_every_s` says something else instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.02
SHORTEST_S, LOST_S, LONGEST_S = 5.0, 30.0, 300.0
_NEWEST_WEIGHS = 0.5
_GUESSED_BYTES_S = 1e9  # of one rank, before anything was measured


def every_s(cost_s: float) -> float:
    """Seconds between snapshots that cost so much each."""
    return min(LONGEST_S, max(SHORTEST_S, cost_s / SHARE))


class Cadence:
    """Of one world's snapshots, on the rank that decides. `fixed_s`: the interval a person chose, 0 for none but those
    that are asked for, None for `every_s` of what they cost."""

    def __init__(self, fixed_s: float | None, clock: Callable[[], float] = time.monotonic):
        self._fixed_s, self._clock = fixed_s, clock
        self._cost_s = 0.0
        self._measured = False
        self._last_s = clock()
        self._refused = False
        self._said_dear = False

    def guess(self, bytes_per_rank: int) -> None:
        """What the first one will write: it is not due sooner than a snapshot of this size should be."""
        if not self._measured:
            self._cost_s = bytes_per_rank / _GUESSED_BYTES_S

    @property
    def interval_s(self) -> float:
        """Between the last one and the next. Where there was no room it is due still, and asking costs next to nothing:
        waiting 30 s lost 50 steps once memory had room again, waiting longer each time 76."""
        base_s = every_s(self._cost_s) if self._fixed_s is None else self._fixed_s
        return min(max(base_s, SHORTEST_S), LOST_S) if self._refused else base_s

    def due(self) -> bool:
        return self._fixed_s != 0 and self._clock() - self._last_s >= self.interval_s

    def begun(self) -> None:
        self._last_s = self._clock()

    def refused(self) -> bool:
        """There was no room. Whether this is news: not if there was none the last time."""
        self.begun()
        is_news, self._refused = not self._refused, True
        return is_news

    def wrote(self, cost_s: float) -> str:
        """One is committed and cost so much. A sentence, once, where the bound on what is lost gives way."""
        weight = _NEWEST_WEIGHS if self._measured else 1.0
        self._cost_s, self._measured = weight * cost_s + (1 - weight) * self._cost_s, True
        self._refused = False
        if self._fixed_s is not None or self._said_dear or every_s(self._cost_s) <= LOST_S:
            return ""
        self._said_dear = True
        return (
            f"a snapshot costs {self._cost_s:.1f} s of training: one is taken every {self.interval_s:.0f} s, so "
            f"that they take {SHARE:.0%} of the time, and a sudden end loses up to that much work instead of "
            f"{LOST_S:.0f} s (snapshot_every_s sets another interval)"
        )
