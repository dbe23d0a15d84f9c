"""A teacher as a judge: the log-probability of each token of an answer to a model that an engine serves. A token's
advantage is how much likelier it is to the teacher than it was to the model that wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.rollouts.judge import Judge
from train.rollouts.samples import Verdict


class Teacher(Judge):
    def why_nothing(self, verdict: Verdict) -> str:
        if any(one is not None for one in verdict["log_probs"]):
            return ""
        return (
            f"the teacher gave no log-probabilities of any of {len(verdict['errors'])} answers: {verdict['errors'][0]}"
        )

    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        return [
            None if theirs is None else (np.array(theirs) - ours).astype(np.float32)
            for theirs, ours in zip(verdict["log_probs"], sampled, strict=True)
        ]

    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        return np.array([one is not None for one in advantages])

    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        return {**self._measured(verdict, sampled), "teacher_errors": self.errors(verdict)}

    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        found = self._measured(verdict, sampled)
        return {"loss": found["reverse_kl"], **found}

    def _measured(self, verdict: Verdict, sampled: Sequence[np.ndarray]) -> dict[str, float]:
        """As estimated from the tokens that were sampled: the reverse KL divergence per token and of a whole answer,
        and the entropy of the model per token."""
        pairs = zip(verdict["log_probs"], sampled, strict=True)
        judged = [(np.array(theirs), ours) for theirs, ours in pairs if theirs is not None]
        theirs, ours = (np.concatenate(part) for part in zip(*judged, strict=True))
        apart = ours - theirs
        return {
            "reverse_kl": float(apart.mean()),
            "answer_reverse_kl": float(apart.sum() / len(judged)),
            "entropy": float(-ours.mean()),
        }
