"""Judges of the answers of a step: what is learnt from their verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from train.plan.errors import NothingGraded
from train.rollouts.samples import Verdict

_SAME = 1e-8
"""Rewards that differ by no more are the same."""


class Judge(ABC):
    """sampled: the log-probability of each token, (tokens,) of an answer. group: answers of a prompt, which follow each
    other."""

    @abstractmethod
    def check(self, verdict: Verdict) -> None:
        """Raises NothingGraded where nothing can be learnt from it."""

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


class Grader(Judge):
    """One reward for each answer, which is compared with the other answers to its prompt."""

    def check(self, verdict: Verdict) -> None:
        rewards, errors = verdict["rewards"], verdict["errors"]
        if all(errors) and not any(rewards):
            raise NothingGraded(f"the grader gave no reward for any of {len(rewards)} answers: {errors[0]}")

    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        return [np.array([better]) if better else None for better in advantages(verdict["rewards"], group)]

    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        """Counts prompts whose answers differ in reward."""
        learnt = np.array([better is not None for better in advantages])
        return learnt.reshape(-1, group).any(axis=1).repeat(group)

    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        rewards = verdict["rewards"]
        return {
            "train_mean_reward": _mean(rewards),
            "mean_unresponsive_rewards": rewards.count(None) / len(rewards),
            "equal_rewards": float((~advantages(rewards, group).reshape(-1, group).any(axis=1)).mean()),
            "grader_errors": _failed(verdict),
        }

    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        return {"mean_reward": _mean(verdict["rewards"]), **standard_error(verdict["rewards"], group)}


class Teacher(Judge):
    """The log-probability of each token of an answer to a model that an engine serves. A token's advantage is how much
    likelier it is to the teacher than it was to the model that wrote it."""

    def check(self, verdict: Verdict) -> None:
        if all(theirs is None for theirs in verdict["log_probs"]):
            errors = verdict["errors"]
            why = f"the teacher gave no log-probabilities of any of {len(errors)} answers: {errors[0]}"
            raise NothingGraded(why)

    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        return [
            None if theirs is None else (np.array(theirs) - ours).astype(np.float32)
            for theirs, ours in zip(verdict["log_probs"], sampled, strict=True)
        ]

    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        return np.array([better is not None for better in advantages])

    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
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
            "teacher_errors": _failed(verdict),
        }

    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        metrics = self.step_metrics(verdict, sampled, group)
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


def standard_error(rewards: Sequence[float | None], group: int) -> dict[str, float]:
    """{"mean_reward_error": the standard error of the mean reward}, over prompts: answers to one are alike. Without two
    prompts that have a reward there is none."""
    groups = (rewards[start : start + group] for start in range(0, len(rewards), group))
    means = [_mean(answers) for answers in groups if any(reward is not None for reward in answers)]
    return {"mean_reward_error": float(np.std(means, ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}


def _mean(rewards: Sequence[float | None]) -> float:
    """The mean of the samples that have a reward; 0 if none has."""
    scored = [reward for reward in rewards if reward is not None]
    return float(np.mean(scored)) if scored else 0.0


def _failed(verdict: Verdict) -> float:
    """The share of answers at which the judge failed."""
    return sum(map(bool, verdict["errors"])) / len(verdict["errors"])
