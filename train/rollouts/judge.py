"""Judges of the answers of a step: what each is asked, and what is learnt from its verdict. One subclass for each
kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from train.control.rank_messages import broadcast_json
from train.plan.errors import NothingGraded
from train.rollouts.wanted import Wanted

Verdict = dict[str, list[Any]]
"""One value for each answer, by name; "errors" are texts, empty where there was none."""


class Judge(ABC):
    """kind: by which the controller knows it. values: the name of its value for an answer, None where it has given
    none."""

    kind: ClassVar[str]
    values: ClassVar[str]

    def asked_about(self, wanted: Wanted, place: int) -> dict[str, Any]:
        """What a question has for it: about the prompt of the answer of this place. Called on rank 0."""
        return {"judge": self.kind, "tokens": wanted.prompt(place).tolist()}

    def verdict(self, heard: Mapping[str, dict[str, Any]]) -> Verdict:
        """Collective: of all answers, in order. heard: on rank 0, by question its "verdict", or why there is none
        ("failed"). Raises NothingGraded, on every rank."""
        failed = next((answer["failed"] for answer in heard.values() if "failed" in answer), "")
        found = {
            key: [] if failed else [one for answer in heard.values() for one in answer["verdict"][key]]
            for key in (self.values, "errors")
        }
        failed, found = broadcast_json([failed, found])
        if failed:
            raise NothingGraded(failed)
        return found

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
