"""Schedules the snapshots of a running job, as often as they are cheap.

It measures a snapshot's cost: the stall of training plus the processor time of copying and making room beside training.
The interval makes this 2 % of the time, but is at least 5 s; with a cost up to 0.6 s a crash loses less than half a
minute of work. More expensive snapshots are less frequent, down to every 300 s. `snapshot_every_s` overrides the
interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.02
SHORTEST_S, LOST_S, LONGEST_S = 5.0, 30.0, 300.0
_NEWEST_WEIGHS = 0.5
_GUESSED_BYTES_S = 1e9  # of one rank, before anything was measured


def every_s(cost_s: float) -> float:
    """Seconds between snapshots of this cost."""
    return min(LONGEST_S, max(SHORTEST_S, cost_s / SHARE))


class Cadence:
    """When one world makes snapshots, on the rank that decides. `fixed_s`: the interval a person chose, 0 for none but
    those that are asked for, None for `every_s` of what they cost."""

    def __init__(self, fixed_s: float | None, clock: Callable[[], float] = time.monotonic):
        self._fixed_s, self._clock = fixed_s, clock
        self._cost_s = 0.0
        self._measured = False
        self._last_s = clock()
        self._refused = False
        self._warned_dear = False

    def guess(self, bytes_per_rank: int) -> None:
        """Set the size of the first one, which determines when it is due at the earliest."""
        if not self._measured:
            self._cost_s = bytes_per_rank / _GUESSED_BYTES_S

    @property
    def interval_s(self) -> float:
        """Seconds between the last one and the next. Without room it stays due, because retrying costs almost nothing:
        waiting 30 s lost 50 steps after memory had room again, increasing waits lost 76."""
        base_s = every_s(self._cost_s) if self._fixed_s is None else self._fixed_s
        return min(max(base_s, SHORTEST_S), LOST_S) if self._refused else base_s

    def due(self) -> bool:
        return self._fixed_s != 0 and self._clock() - self._last_s >= self.interval_s

    def begun(self) -> None:
        self._last_s = self._clock()

    def refused(self) -> bool:
        """Record that there was no room. Returns whether this is new: False if there was none last time."""
        self.begun()
        is_news, self._refused = not self._refused, True
        return is_news

    def wrote(self, cost_s: float) -> str:
        """Record a committed snapshot and its cost. Returns a message, once, if the bound on lost work fails."""
        weight = _NEWEST_WEIGHS if self._measured else 1.0
        self._cost_s, self._measured = weight * cost_s + (1 - weight) * self._cost_s, True
        self._refused = False
        if self._fixed_s is not None or self._warned_dear or every_s(self._cost_s) <= LOST_S:
            return ""
        self._warned_dear = True
        return (
            f"a snapshot costs {self._cost_s:.1f} s of training: one is taken every {self.interval_s:.0f} s, so "
            f"that they take {SHARE:.0%} of the time, and a sudden end loses up to that much work instead of "
            f"{LOST_S:.0f} s (snapshot_every_s sets another interval)"
        )
