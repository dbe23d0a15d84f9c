"""A grader as a judge: one reward for each answer, which is compared with the other answers to its prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.data.token_set import TokenSet
from train.graders.calls import calls_in
from train.rollouts.judge import Judge, Verdict

REQUEST_BYTES = 4 << 20
"""The size of the items and answers of one question, unless one alone is larger: a question is one line of JSON."""
_SAME = 1e-8
"""Rewards that differ by no more are the same."""


class Grader(Judge):
    """It reads an answer's text and the prompt's item. tokenizer: created when it is first needed. ends: tokens that
    end an answer."""

    kind, values = "grade", "rewards"

    def __init__(self, tokenizer: Callable[[], Any], ends: Callable[[], Collection[int]]):
        self._tokenizer, self._ends = tokenizer, ends
        self._lines: dict[str, list[bytes]] = {}

    def samples(
        self, path: str, tokens: TokenSet, packs: np.ndarray, answers: Iterable[list[int]]
    ) -> list[dict[str, Any]]:
        lines, samples, room = self._lines_of(path), list[dict[str, Any]](), REQUEST_BYTES
        tokenizer, ends = self._tokenizer(), self._ends()
        for pack, ids in zip(packs, answers, strict=False):
            text = tokenizer.decode(ids[:-1] if ids[-1] in ends else ids, skip_special_tokens=True)
            room -= len(lines[pack]) + len(text.encode())
            if samples and room < 0:
                break
            about = self.about(path, pack)
            said = calls_in(text) if about["tools"] else {"text": text}
            samples.append({**said, "item": about["item"]})
        return samples

    def about(self, path: str, pack: int) -> dict[str, Any]:
        record = json.loads(self._lines_of(path)[pack])
        return {"item": {**record["item"], "messages": record["messages"]}, "tools": bool(record.get("tools"))}

    def _lines_of(self, path: str) -> list[bytes]:
        if path not in self._lines:
            self._lines[path] = Path(path).read_bytes().splitlines()
        return self._lines[path]

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
