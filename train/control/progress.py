"""Holds a run's control signals, its current phase, and its event sink."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

SIGNALS = ("suspend", "cancel", "snapshot")


class Events(Protocol):
    """Receives a run's events; called on rank 0 only."""

    def __call__(self, event: str, **data: Any) -> None: ...


@dataclass
class ControlSignals:
    """Control signals sent to this rank; another thread writes them, the loop reads them between micro-batches."""

    suspend: bool = False
    cancel: bool = False
    snapshot: bool = False

    def __post_init__(self) -> None:
        self._profile = 0

    def ask(self, name: str) -> None:
        """Raises ValueError for an unknown name."""
        if name not in SIGNALS:
            raise ValueError(f"signal {name!r} is unknown; expected one of {SIGNALS}")
        setattr(self, name, True)

    def profile(self, steps: int) -> None:
        """This many steps of this rank are to be profiled from the next one on."""
        self._profile = steps

    def take_profile(self) -> int:
        """0 if nobody asks."""
        steps, self._profile = self._profile, 0
        return steps


@dataclass
class Progress:
    """The run's current phase, for the heartbeat: a phase that lasts too long is a hang."""

    phase: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phase, self.step, self.since = phase, self.step if step is None else step, time.monotonic()

    def report(self) -> dict[str, Any]:
        return {"phase": self.phase, "step": self.step, "in_phase_s": time.monotonic() - self.since}
