"""What trying a choice brought, by what really happened, and how soon one that failed may be tried again.

The queueing model foretells what each choice costs and how many requests are late, and it can be wrong for reasons that
it will never see. So every choice in force is on trial, and one that failed is barred, each time for twice as long:
in traffic that stays as it is there are O(log T) trials in a time T, whatever the model says.

- A constant fails if more than twice as many requests as may be were late during it, and more than one burst that the
  half hour has room for. So do all smaller ones.
- Moving fails if it cost more than the reference, the least constant that is in time, would have cost meanwhile. What
  the reference costs needs no model: its replicas times the time.

The bound, sketched. Let c be what a stop of the job costs on all its devices; compare with every constant that keeps
the allowance in both halves of the time. (a) The lateness of a constant falls with its size, so the best one is the
least that is in time; while it is in force nothing is lost. (b) A stint of moving loses at most 2c before it is barred,
plus c for a stop that lasts then and c for its return. (c) A constant that is too small loses no training; it costs two
stops, and the late requests that its failure takes. (d) Bars double, so in traffic that stays as it is the trials of
(b) and (c) number at most log2(T / 5 min) + 1 for moving and as many for each constant below the best. The loss against
the best constant is O(c N log T) on N devices, however wrong the model is, and O(c) for each change of the traffic that
makes moving pay or the reference rise. Where moving pays its gain comes on top: its stint lasts for as long as the sum,
faded by half an hour, is above -2c.

Lazy switching: Kalai and Vempala 2005; Cesa-Bianchi and Lugosi 2006, chapter 4. The sinking allowance is the virtual
queue of constrained experts (Sinha and Vaze 2025). Against an adversary no policy keeps both the lateness and the
training of the best constant in hindsight (Mannor et al. 2009): what a trial makes late is bounded, but a burst that
nothing foretells is late. What of this a comparison with hindsight is granted as a start-up cost stands in
benchmarks/_regret.py; tests/property/test_no_regret.py draws traffic and boxes to look for more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

BURST_S = 60.0
"""Requests that were late within so long of each other were late for the same reason."""
FIRST_BAR_S = 300.0
LONGEST_BAR_S = 6 * 3600.0


@dataclass(slots=True)
class _Bar:
    until_s: float = 0.0
    for_s: float = FIRST_BAR_S


class Bars:
    """Bars whatever has failed. A key that never did is not barred."""

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

    def lift(self, key: int | str) -> None:
        """Lifts a bar: the choice failed against a reference that has turned out to be wrong."""
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


class Bursts:
    """How many requests are late together. Late ones come in bursts, so a number of them is less certain than if each
    were late by itself: of `n` its standard deviation is about sqrt(n x mean)."""

    def __init__(self) -> None:
        # Faded sums over the bursts: of the squares of their sizes, and of the sizes.
        self.squares, self.sizes = 0.0, 0.0
        self._now, self._last_s = 0.0, 0.0

    def seen(self, now_s: float, late: int, fade: float) -> None:
        self.squares, self.sizes = self.squares * fade, self.sizes * fade
        if not late:
            return
        before = self._now if now_s - self._last_s <= BURST_S else 0.0
        self._now, self._last_s = before + late, now_s
        self.squares += self._now * self._now - before * before
        self.sizes += late

    @property
    def mean(self) -> float:
        """Late requests in the burst of one of them, at least 1."""
        return max(self.squares / self.sizes, 1.0) if self.sizes else 1.0


@dataclass(slots=True)
class Stint:
    """A time during which the number moved, until it stands still again. gain_s: device seconds that training had more
    of than with the reference.

    A stop of the job is paid while it lasts, as what it is paid for comes then too: devices that the reference would
    not have given. Paid at once, each hand-over to few replicas looked like a loss before it could bring anything, and
    where the reference has nearly all devices, moving was barred as soon as it began."""

    gain_s: float = 0.0
    ending_s: float | None = None
    """Since when a constant is in force again; the hand-over to it belongs to the stint."""
    owed_s: float = 0.0
    """What is left to pay of the last stop, in device seconds."""
    _owed_per_s: float = 0.0

    def lived(self, passed_s: float, fewer: int) -> None:
        """Time has passed with this many fewer replicas awake than the reference."""
        paid_s = min(passed_s * self._owed_per_s, self.owed_s)
        self.owed_s -= paid_s
        self.gain_s += passed_s * fewer - paid_s

    def stopped(self, stop_s: float, pause_s: float) -> None:
        """A stop of the job that costs `stop_s` device seconds within `pause_s` has begun, and replaces one that
        lasts."""
        if pause_s <= 0:
            return
        self.owed_s, self._owed_per_s = stop_s, stop_s / pause_s
