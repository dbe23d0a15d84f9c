"""Defines one line of `make gpu-smoke`: a measurement, its bound, and the remedy if the measurement fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Check:
    """A measurement with bounds. found: measured value in `unit`; NaN fails. least, most: bounds of `found`."""

    name: str
    found: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    remedy: str = ""

    @property
    def ok(self) -> bool:
        above = self.least is None or self.found >= self.least
        return above and (self.most is None or self.found <= self.most)

    def line(self) -> str:
        bound = "" if self.least is None else f", at least {self.least:g}"
        bound += "" if self.most is None else f", at most {self.most:g}"
        rest = "" if self.ok else f"\n      {self.remedy}"
        return f"{'ok' if self.ok else 'FAIL':4}  {self.name}: {self.found:.4g} {self.unit}{bound}{rest}"


def best_s(synchronize: Callable[[], Any], work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of ROUNDS rounds, after a warm-up round."""
    work()
    synchronize()
    took = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        work()
        synchronize()
        took.append(time.perf_counter() - began_s)
    return min(took)
