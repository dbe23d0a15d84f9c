"""A grader as a judge: one reward for each answer, which is compared with the other answers to its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.rollouts.judge import Judge
from train.rollouts.samples import Verdict

_SAME = 1e-8
"""Rewards that differ by no more are the same."""


class Grader(Judge):
    def why_nothing(self, verdict: Verdict) -> str:
        rewards, errors = verdict["rewards"], verdict["errors"]
        if all(errors) and not any(rewards):
            return f"the grader gave no reward for any of {len(rewards)} answers: {errors[0]}"
        return ""

    def advantages(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> list[np.ndarray | None]:
        return [np.array([one]) if one else None for one in advantages(verdict["rewards"], group)]

    def counted(self, advantages: Sequence[np.ndarray | None], group: int) -> np.ndarray:
        """Counts prompts whose answers differ in reward."""
        learnt = np.array([one is not None for one in advantages])
        return learnt.reshape(-1, group).any(axis=1).repeat(group)

    def step_metrics(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        rewards = verdict["rewards"]
        groups = advantages(rewards, group).reshape(-1, group)
        return {
            "train_mean_reward": _mean(rewards),
            "mean_unresponsive_rewards": rewards.count(None) / len(rewards),
            "equal_rewards": float((~groups.any(axis=1)).mean()),
            "grader_errors": self.errors(verdict),
        }

    def validated(self, verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> dict[str, float]:
        rewards = verdict["rewards"]
        return {"mean_reward": _mean(rewards), **standard_error(rewards, group)}


def advantages(rewards: Sequence[float | None], group: int) -> np.ndarray:
    """(n,) float32: each reward less the mean of its group, whose members follow each other. 0 for a sample without a
    reward, which does not count in the mean, and for a group whose rewards are all the same."""
    found = np.zeros(len(rewards), np.float32)
    for start in range(0, len(rewards), group):
        scored = [place for place in range(start, start + group) if rewards[place] is not None]
        values = np.array([rewards[place] for place in scored], np.float64)
        if len(scored) > 1 and np.ptp(values) > _SAME:
            found[scored] = values - values.mean()
    return found


def standard_error(rewards: Sequence[float | None], group: int) -> dict[str, float]:
    """{"mean_reward_error": the standard error of the mean reward}, over prompts: answers to one are alike. Without two
    prompts that have a reward there is none."""
    groups = (rewards[start : start + group] for start in range(0, len(rewards), group))
    means = [_mean(one) for one in groups if any(reward is not None for reward in one)]
    return {"mean_reward_error": float(np.std(means, ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}


def _mean(rewards: Sequence[float | None]) -> float:
    """The mean of the samples that have a reward; 0 if none has."""
    scored = [reward for reward in rewards if reward is not None]
    return float(np.mean(scored)) if scored else 0.0
