"""Computes the reward of a sample from a grader, its item and the answers of models. It may take minutes of CPU: a
process that serves others calls it in another process (hosts.py)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import FiniteFloat

from train.graders import formula, similarity, templates
from train.graders.errors import GradingErrors, GradingFailed
from train.graders.graders import (
    Grader,
    LabelModel,
    Leaf,
    Multi,
    Python,
    ScoreModel,
    StringCheck,
    TextSimilarity,
    leaves,
)
from train.graders.templates import Sample

RunPython = Callable[[str, dict[str, Any], Any], float]
"""`(source, sample, item) -> reward`; raises GradingFailed."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answer to a request of `requests`: its text, or why there is none."""

    text: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompt's tokens that were cached."""
    error: str = ""
    refused: bool = False
    tools: list[Any] = field(default_factory=list)
    """Calls of tools, as chat's `tool_calls`."""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Graded:
    """A sample's reward; 0 with the flags in `errors` if there is none."""

    reward: FiniteFloat
    passed: bool
    sub_rewards: dict[str, float] = field(default_factory=dict)
    """The rewards of the graders of a `multi` grader, by name."""
    errors: GradingErrors = GradingErrors()
    messages: list[str] = field(default_factory=list)
    """What went wrong, in words."""
    tokens_by_model: dict[str, int] = field(default_factory=dict)
    was_run: bool = True
    """False: the process that grades ended or took too long."""


def requests(grader: Grader, sample: Sample, item: Any) -> dict[str, dict[str, Any]]:
    """Bodies of chat completions that the grader needs answers to, by the name of the grader that asks; a grader whose
    data lacks a variable asks nothing; `grade` then reports it."""
    asked: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves(grader).items():
        if isinstance(leaf, ScoreModel | LabelModel):
            with suppress(GradingFailed):
                asked[name] = leaf.request(sample, item)
    return asked


def grade(
    grader: Grader, sample: Sample, item: Any, answers: Mapping[str, ModelAnswer], run_python: RunPython
) -> Graded:
    """Never raises for faults of the sample, the item or a user's code: the result's flags report them."""
    rewards: dict[str, float] = {}
    errors, messages = GradingErrors(), []
    for name, leaf in leaves(grader).items():
        try:
            rewards[name], flags = _leaf(leaf, sample, item, answers.get(name), run_python)
            errors |= flags
        except GradingFailed as failure:
            errors |= failure.errors
            messages.append(f"{name}: {failure}")
    reward = 0.0
    if not errors:
        try:
            reward = (
                formula.value(grader.calculate_output, rewards) if isinstance(grader, Multi) else rewards.popitem()[1]
            )
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


def _leaf(
    leaf: Leaf,
    sample: Sample,
    item: Any,
    answer: ModelAnswer | None,
    run_python: RunPython,
) -> tuple[float, GradingErrors]:
    """Raises GradingFailed."""
    match leaf:
        case StringCheck() | TextSimilarity():
            text, reference = (templates.fill(one, sample, item) for one in (leaf.input, leaf.reference))
            if isinstance(leaf, StringCheck):
                return float(_string_check(leaf.operation, text, reference)), GradingErrors()
            reward, cut = similarity.similarity(leaf.evaluation_metric, text, reference)
            return reward, GradingErrors(truncated_observation_error=cut)
        case Python():
            reward = run_python(leaf.source, sample.for_code(), item)
            if not math.isfinite(reward):
                raise GradingFailed(
                    f"grade() returned {reward}, which is not a reward",
                    GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=f"{reward}"),
                )
            return reward, GradingErrors()
        case ScoreModel() | LabelModel():
            return _by_model(leaf, sample, item, answer), GradingErrors()


def _string_check(operation: str, text: str, reference: str) -> bool:
    match operation:
        case "eq":
            return text == reference
        case "ne":
            return text != reference
        case "like":
            return reference in text
        case _:
            return reference.casefold() in text.casefold()


def _by_model(leaf: ScoreModel | LabelModel, sample: Sample, item: Any, answer: ModelAnswer | None) -> float:
    if answer is None:
        leaf.request(sample, item)  # says which variable has no value
        answer = ModelAnswer(error="it was not asked")
    if answer.error:
        raise GradingFailed(
            f"the model {leaf.model!r} did not answer: {answer.error}",
            GradingErrors(model_grader_server_error=True, model_grader_server_error_details=answer.error),
        )
    if answer.refused:
        raise GradingFailed(f"the model {leaf.model!r} refused", GradingErrors(model_grader_refusal_error=True))
    try:
        return leaf.score(json.loads(answer.text, strict=False))
    except (KeyError, TypeError, ValueError) as error:
        why = f"is not a grade ({error})"
        if answer.finish_reason == "length":
            why = f"was cut at the {leaf.answer_tokens} tokens that it may have, before it had its grade"
        text = f"the answer of the model {leaf.model!r} {why}: {answer.text[:200]!r}"
        raise GradingFailed(text, GradingErrors(model_grader_parse_error=True)) from None
