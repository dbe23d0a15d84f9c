"""Judges of the answers of a step: what is learnt from their verdict. One subclass for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from train.plan.errors import NothingGraded
from train.rollouts.samples import Verdict


class Judge(ABC):
    """sampled: the log-probability of each token, (tokens,) of an answer. group: answers of a prompt, which follow each
    other."""

    @abstractmethod
    def why_nothing(self, verdict: Verdict) -> str:
        """Why nothing can be learnt from it, "" if something can."""

    @abstractmethod
    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        """The advantages, float32: how much better than expected each token of each answer is, (tokens,), or (1,) for
        all of them; None for an answer from which nothing is learnt."""

    @abstractmethod
    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        """(answers,) bool: whose tokens the loss of a step is divided by."""

    @abstractmethod
    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        """Figures of a step, for its event."""

    @abstractmethod
    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        """Figures of a validation, for its event."""

    def check(self, verdict: Verdict) -> None:
        """Raises NothingGraded."""
        if why := self.why_nothing(verdict):
            raise NothingGraded(why)

    def errors(self, verdict: Verdict) -> float:
        """The share of answers at which it failed."""
        return sum(map(bool, verdict["errors"])) / len(verdict["errors"])
