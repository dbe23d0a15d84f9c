"""Remembers the validations of a run: which was the best, and how many came after it.

A run that resumes reads them from its own event log. Validations by an earlier world do not count for steps that are
done again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from train.trainer.event_log import read_events


class Validations:
    """The validations after the first step; before it the weights are the starting model's."""

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}

    def read(self, run_dir: str | Path, step: int) -> None:
        """Take those of earlier worlds, up to `step`."""
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

    def published(self, run_dir: str | Path) -> bool:
        """Whether a version of the best step was published."""
        return any(event["event"] == "published" and event["step"] == self.best_step for event in read_events(run_dir))
