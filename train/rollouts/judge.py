"""Judges of the answers of a step: what each is asked, and what is learnt from its verdict. One subclass for each
kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from train.data.token_set import TokenSet
from train.plan.errors import NothingGraded

Verdict = dict[str, list[Any]]
"""One value for each answer, by name; "errors" are texts, empty where there was none."""


class Judge(ABC):
    """kind: of its questions. values: the name of its value for an answer, None where it has given none."""

    kind: ClassVar[str]
    values: ClassVar[str]

    @abstractmethod
    def samples(
        self, path: str, tokens: TokenSet, packs: np.ndarray, answers: Iterable[list[int]]
    ) -> list[dict[str, Any]]:
        """The question about the first of these answers to the prompts of a file, as many as one question has room for.
        Called on rank 0."""

    @abstractmethod
    def about(self, path: str, pack: int) -> dict[str, Any]:
        """What a question to engines has for it beside the tokens of this prompt of a file. Called on rank 0."""

    @abstractmethod
    def why_nothing(self, verdict: Verdict) -> str:
        """Why nothing can be learnt from it, "" if something can."""

    @abstractmethod
    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        """The advantages, float32: how much better than expected each token of each answer is, (tokens,), or (1,) for
        all of them; None for an answer from which nothing is learnt. sampled: the log-probability of each token,
        (tokens,) of an answer. group: answers of a prompt, which follow each other."""

    @abstractmethod
    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        """(answers,) bool: whose tokens the loss of a step is divided by."""

    @abstractmethod
    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        """Figures of a step, for its event."""

    @abstractmethod
    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        """Figures of a validation, for its event."""

    def empty(self) -> Verdict:
        return {self.values: [], "errors": []}

    def check(self, verdict: Verdict) -> None:
        """Raises NothingGraded."""
        if why := self.why_nothing(verdict):
            raise NothingGraded(why)

    def errors(self, verdict: Verdict) -> float:
        """The share of answers at which it failed."""
        return sum(map(bool, verdict["errors"])) / len(verdict["errors"])
