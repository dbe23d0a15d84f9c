"""What trying a choice brought, by what really happened, and how soon one that failed may be tried again.

The queueing model foretells what each choice costs and how many requests are late, and it can be wrong for reasons that
it will never see. So every choice in force is on trial, and one that failed is barred, each time for twice as long:
in traffic that stays as it is there are O(log T) trials in a time T, whatever the model says.

- A constant fails if requests were late during it. So do all smaller ones.
- Moving fails if it cost more than the reference, the least constant that is in time, would have cost meanwhile. What
  the reference costs needs no model: its replicas times the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

FIRST_BAR_S = 300.0
LONGEST_BAR_S = 6 * 3600.0


@dataclass(slots=True)
class _Bar:
    until_s: float = 0.0
    for_s: float = FIRST_BAR_S


class Bars:
    """For whatever has failed. A key that never did is not barred."""

    def __init__(self) -> None:
        self._bars: dict[int | str, _Bar] = {}

    def barred(self, key: int | str, now_s: float) -> bool:
        bar = self._bars.get(key)
        return bar is not None and now_s < bar.until_s

    def failed(self, key: int | str, now_s: float) -> None:
        bar = self._bars.setdefault(key, _Bar())
        if now_s < bar.until_s:
            return
        bar.until_s = now_s + bar.for_s
        bar.for_s = min(2 * bar.for_s, LONGEST_BAR_S)

    def forgive(self, key: int | str) -> None:
        """It failed against a reference that has turned out to be none."""
        bar = self._bars.get(key)
        if bar is not None:
            bar.until_s, bar.for_s = 0.0, max(bar.for_s / 2, FIRST_BAR_S)

    def proved(self, key: int | str) -> None:
        self._bars.pop(key, None)

    def state(self, now_s: float) -> list[list[Any]]:
        """[key, seconds left, seconds of the next bar] of each, as JSON."""
        return [[key, max(bar.until_s - now_s, 0.0), bar.for_s] for key, bar in self._bars.items()]

    def restore(self, state: list[list[Any]], now_s: float) -> None:
        self._bars = {key: _Bar(now_s + left_s, for_s) for key, left_s, for_s in state}


class Awake:
    """How many replicas were awake of late."""

    def __init__(self, within_s: float):
        self._within_s = within_s
        self._counts: deque[tuple[float, int]] = deque()

    def seen(self, now_s: float, awake: int) -> None:
        while self._counts and self._counts[-1][1] >= awake:
            self._counts.pop()
        self._counts.append((now_s, awake))
        while self._counts[0][0] < now_s - self._within_s:
            self._counts.popleft()

    @property
    def lowest(self) -> int:
        """The fewest within that time: what waits now may wait since then."""
        return self._counts[0][1]


@dataclass(slots=True)
class Stint:
    """A time during which the number moved, until it stands still again. gain_s: device seconds that training had more
    of than with the reference."""

    gain_s: float = 0.0
    ending_s: float | None = None
    """Since when a constant is in force again; the hand-over to it belongs to the stint."""
