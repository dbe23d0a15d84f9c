"""A teacher as a judge: the log-probability of each token of an answer to a model that an engine serves. A token's
advantage is how much likelier it is to the teacher than it was to the model that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from train.data.token_set import TokenSet
from train.rollouts.judge import Judge, Verdict

REQUEST_TOKENS = 1 << 17
"""The tokens of the prompts and answers of one question, unless one alone is longer: the reply is one line of JSON,
with some 20 bytes for each token of an answer."""


class Teacher(Judge):
    """It reads the tokens of prompt and answer exactly as the model read and wrote them."""

    kind, values = "teach", "log_probs"

    def samples(
        self, path: str, tokens: TokenSet, packs: np.ndarray, answers: Iterable[list[int]]
    ) -> list[dict[str, Any]]:
        samples, room = list[dict[str, Any]](), REQUEST_TOKENS
        for pack, ids in zip(packs, answers, strict=False):
            (index,) = tokens.packs[pack]
            prompt = tokens.tokens_of(int(index)).tolist()
            room -= len(prompt) + len(ids)
            if samples and room < 0:
                break
            samples.append({"tokens": [*prompt, *ids], "answer": len(ids)})
        return samples

    def about(self, path: str, pack: int) -> dict[str, Any]:
        return {}

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
