"""Computes the reward of a sample from a grader, the sample's item and the answers of models. Grading may take minutes
of CPU, so processes that serve clients run it in another process (sandbox.py)."""

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
    """The reward of a sample; 0 with flags in `errors` if grading failed. sub_rewards: rewards of a `multi`'s graders.
    messages: descriptions of errors. was_run: False if the grading process ended or took too long."""

    reward: FiniteFloat
    passed: bool
    sub_rewards: dict[str, float] = field(default_factory=dict)
    errors: GradingErrors = GradingErrors()
    messages: list[str] = field(default_factory=list)
    tokens_by_model: dict[str, int] = field(default_factory=dict)
    was_run: bool = True


def requests(grader: Grader, sample: Sample, item: Any) -> dict[str, dict[str, Any]]:
    """Return the chat completions that the grader needs, by the name of the asking grader. If the data lacks a variable
    of a grader, that grader asks nothing, and `grade` reports the failure."""
    bodies: dict[str, dict[str, Any]] = {}
    for name, judge in judges(grader).items():
        with suppress(GradingFailed):
            bodies[name] = judge.request(sample, item)
    return bodies


def grade(grader: Grader, sample: Sample, item: Any, answers: Mapping[str, ModelAnswer], run: RunPython) -> Graded:
    """Grade a sample. Faults of the sample, the item or a user's code do not raise: flags report these faults."""
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
