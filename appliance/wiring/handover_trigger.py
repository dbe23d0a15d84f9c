"""Records who asked for the hand-overs that begin now: a person, a mode window, or the scheduler itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Ask:
    generation: int
    by: str
    what: str


class HandoverTrigger:
    """Requests that the loop has not settled yet; the newest one is why devices move.

    status: the loop's, with "settled", and "policy" with "schedule" and "since_s".
    """

    def __init__(self, status: Callable[[], dict[str, Any]]):
        self._status = status
        self._asks: list[_Ask] = []
        self._window_since_s = 0.0

    def note(self, generation: int, by: str, what: str) -> None:
        """`by` asked for `what`; the loop was nudged about it with this generation."""
        self._asks.append(_Ask(generation, by, what))

    def now(self) -> dict[str, str]:
        """{"asked_by", "asked_for"}: a key's name, "box", "window <id>" or "scheduler"; and what was asked for."""
        status = self._status()
        self._asks = [ask for ask in self._asks if ask.generation > status["settled"]]
        if self._asks:
            newest = max(self._asks, key=lambda ask: ask.generation)
            return {"asked_by": newest.by or "box", "asked_for": newest.what}
        policy = status["policy"]
        if policy["schedule"] and policy["since_s"] != self._window_since_s:
            # The first hand-over since it began; later ones follow demand and the queue again.
            self._window_since_s = policy["since_s"]
            return {"asked_by": f"window {policy['window']}", "asked_for": f"mode {policy['kind']}"}
        return {"asked_by": "scheduler", "asked_for": "demand and queue"}
