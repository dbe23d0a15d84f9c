"""What is learnt from the verdicts on the answers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from train.plan.errors import NothingGraded
from train.rollouts.samples import Verdict

_SAME = 1e-8
"""Rewards that differ by no more are the same."""


@dataclass
class Judged:
    """sampled: the log-probability of each token, (tokens,) of an answer. group: answers of a prompt, which follow each
    other. Raises NothingGraded where nothing can be learnt."""

    verdict: Verdict
    sampled: Sequence[np.ndarray]
    group: int

    @property
    def failed(self) -> float:
        """The share of answers at which the judge failed."""
        return sum(map(bool, self.verdict["errors"])) / len(self.verdict["errors"])


@dataclass
class Graded(Judged):
    """One reward for each answer, which is compared with the other answers to its prompt."""

    def __post_init__(self) -> None:
        self._rewards, errors = self.verdict["rewards"], self.verdict["errors"]
        if all(errors) and not any(self._rewards):
            raise NothingGraded(f"the grader gave no reward for any of {len(errors)} answers: {errors[0]}")

    @cached_property
    def advantages(self) -> list[np.ndarray | None]:
        """Float32, how much better than expected an answer is, (1,) for all its tokens; None for an answer from which
        nothing is learnt."""
        return [np.array([better]) if better else None for better in advantages(self._rewards, self.group)]

    @property
    def counted(self) -> np.ndarray:
        """(answers,) bool, whose tokens the loss of a step is divided by: those to prompts whose answers differ in
        reward."""
        learnt = np.array([better is not None for better in self.advantages])
        return learnt.reshape(-1, self.group).any(axis=1).repeat(self.group)

    def step_metrics(self) -> dict[str, float]:
        """Figures of a step, for its event."""
        rewards = self._rewards
        return {
            "train_mean_reward": _mean(rewards),
            "mean_unresponsive_rewards": rewards.count(None) / len(rewards),
            "equal_rewards": 1.0 - float(self.counted.mean()),
            "grader_errors": self.failed,
        }

    def validated(self) -> dict[str, float]:
        """Figures of a validation, for its event. "mean_reward_error": the standard error of the mean reward over
        prompts, as answers to one are alike; without two prompts that have a reward there is none."""
        groups = (self._rewards[start : start + self.group] for start in range(0, len(self._rewards), self.group))
        means = [_mean(answers) for answers in groups if any(reward is not None for reward in answers)]
        error = {"mean_reward_error": float(np.std(means, ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}
        return {"mean_reward": _mean(self._rewards), **error}


@dataclass
class Taught(Judged):
    """The log-probability of each token of an answer to a model that an engine serves. A token's advantage is how much
    likelier it is to the teacher than it was to the model that wrote it."""

    def __post_init__(self) -> None:
        if all(theirs is None for theirs in self.verdict["log_probs"]):
            errors = self.verdict["errors"]
            why = f"the teacher gave no log-probabilities of any of {len(errors)} answers: {errors[0]}"
            raise NothingGraded(why)

    @cached_property
    def advantages(self) -> list[np.ndarray | None]:
        """As `Graded` has them, (tokens,) of each answer."""
        return [
            None if theirs is None else (np.array(theirs) - ours).astype(np.float32)
            for theirs, ours in zip(self.verdict["log_probs"], self.sampled, strict=True)
        ]

    @property
    def counted(self) -> np.ndarray:
        return np.array([better is not None for better in self.advantages])

    def step_metrics(self) -> dict[str, float]:
        """As estimated from the tokens that were sampled: the reverse KL divergence per token and of a whole answer,
        and the entropy of the model per token."""
        apart = np.concatenate([-better for better in self.advantages if better is not None])
        ours = np.concatenate([ours for ours, counts in zip(self.sampled, self.counted, strict=True) if counts])
        return {
            "reverse_kl": float(apart.mean()),
            "answer_reverse_kl": float(apart.sum() / self.counted.sum()),
            "entropy": float(-ours.mean()),
            "teacher_errors": self.failed,
        }

    def validated(self) -> dict[str, float]:
        metrics = self.step_metrics()
        del metrics["teacher_errors"]
        return {"loss": metrics["reverse_kl"], **metrics}


def advantages(rewards: Sequence[float | None], group: int) -> np.ndarray:
    """(n,) float32: each reward less the mean of its group, whose members follow each other. 0 for a sample without a
    reward, which does not count in the mean, and for a group whose rewards are all the same."""
    better = np.zeros(len(rewards), np.float32)
    for start in range(0, len(rewards), group):
        scored = [place for place in range(start, start + group) if rewards[place] is not None]
        values = np.array([rewards[place] for place in scored], np.float64)
        if len(scored) > 1 and np.ptp(values) > _SAME:
            better[scored] = values - values.mean()
    return better


def _mean(rewards: Sequence[float | None]) -> float:
    """The mean of the samples that have a reward; 0 if none has."""
    scored = [reward for reward in rewards if reward is not None]
    return float(np.mean(scored)) if scored else 0.0
