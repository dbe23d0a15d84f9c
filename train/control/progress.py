"""Holds a run's control signals, its current phase, and its event sink."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Events = Callable[..., None]
"""Receives a run's events, by name with data as keywords; called on rank 0 only."""


@dataclass
class ControlSignals:
    """What this rank is asked for; another thread writes it, the loop reads it between micro-batches."""

    suspend: bool = False

    def ask_suspend(self) -> None:
        self.suspend = True


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
