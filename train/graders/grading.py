"""Computes the reward of a sample from a grader, its item and the answers of models. It may take minutes of CPU: a
process that serves others calls it in another process (sandbox.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import FiniteFloat

from train.graders.errors import GradingErrors, GradingFailed
from train.graders.graders import Grader, ModelAnswer, Multi, RunPython, judges, leaves
from train.graders.templates import Sample


@dataclass(frozen=True, slots=True)
class Graded:
    """A sample's reward; 0 with the flags in `errors` if there is none. sub_rewards: of the graders of a `multi`
    grader, by name. messages: what went wrong, in words. was_run: False if the process that grades ended or took too
    long."""

    reward: FiniteFloat
    passed: bool
    sub_rewards: dict[str, float] = field(default_factory=dict)
    errors: GradingErrors = GradingErrors()
    messages: list[str] = field(default_factory=list)
    tokens_by_model: dict[str, int] = field(default_factory=dict)
    was_run: bool = True


def requests(grader: Grader, sample: Sample, item: Any) -> dict[str, dict[str, Any]]:
    """Bodies of chat completions that the grader needs answers to, by the name of the grader that asks; a grader whose
    data lacks a variable asks nothing; `grade` then reports it."""
    bodies: dict[str, dict[str, Any]] = {}
    for name, judge in judges(grader).items():
        with suppress(GradingFailed):
            bodies[name] = judge.request(sample, item)
    return bodies


def grade(grader: Grader, sample: Sample, item: Any, answers: Mapping[str, ModelAnswer], run: RunPython) -> Graded:
    """Never raises for faults of the sample, the item or a user's code: the result's flags report them."""
    rewards: dict[str, float] = {}
    errors, messages, reward = GradingErrors(), [], 0.0
    for name, leaf in leaves(grader).items():
        try:
            rewards[name], flags = leaf.reward(sample, item, answers.get(name), run)
            errors |= flags
        except GradingFailed as failure:
            errors |= failure.errors
            messages.append(f"{name}: {failure}")
    if not errors:
        try:
            reward = grader.value(rewards) if isinstance(grader, Multi) else rewards[grader.name]
        except GradingFailed as failure:
            errors |= failure.errors
            messages.append(str(failure))
    tokens: Counter[str] = Counter()
    for answer in answers.values():
        tokens[answer.model] += answer.prompt_tokens + answer.completion_tokens
    return Graded(
        reward=reward,
        passed=not errors and grader.passes(reward),
        sub_rewards=rewards if isinstance(grader, Multi) else {},
        errors=errors,
        messages=messages,
        tokens_by_model=dict(+tokens),
    )
