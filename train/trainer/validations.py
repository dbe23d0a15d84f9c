"""Remembers the validations of a run: which was the best, and how many came after it.

Rank 0 reads them from the run's own event log, so a run that goes on after a suspension or a death needs no further
state. Validations by an earlier world do not count for steps that are done again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from train.trainer.event_log import read_events


class Validations:
    """The validations after the steps 1 to `step`. The one before the first step does not count: its weights are the
    starting model's."""

    def __init__(self, run_dir: str | Path, step: int) -> None:
        self._run_dir = run_dir
        self._scores: dict[int, float] = {}
        for event in read_events(run_dir):
            if event["event"] == "validation" and event["step"] <= step:
                self.add(event["step"], event)

    def add(self, step: int, found: dict[str, Any]) -> None:
        """found: the mean reward of a run that has one, else the loss."""
        if step > 0:
            score = found["mean_reward"] if "mean_reward" in found else -found["loss"]
            self._scores[step] = score if math.isfinite(score) else -math.inf

    @property
    def best_step(self) -> int:
        """The step of the best validation, the first of equally good ones; 0 if there was none."""
        return max(self._scores, key=lambda step: (self._scores[step], -step), default=0)

    @property
    def since_best(self) -> int:
        """How many validations were not better than the best before them."""
        return sum(step > self.best_step for step in self._scores)

    def published(self, step: int) -> bool:
        """Whether a version of this step was published."""
        return any(event["event"] == "published" and event["step"] == step for event in read_events(self._run_dir))
