"""Defines the requests of a simulated run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(slots=True)
class Requests:
    """Requests sorted by arrival. arrival_s: seconds since the first arrival. prompt, output: tokens, at least 1."""

    arrival_s: array[float]
    prompt: array[int]
    output: array[int]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def horizon_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrival_s[-1] if self.arrival_s else 0.0

    def later(self, by_s: float) -> Requests:
        """Return the same requests, each `by_s` seconds later; the token arrays are shared."""
        return Requests(array("d", (at_s + by_s for at_s in self.arrival_s)), self.prompt, self.output)
