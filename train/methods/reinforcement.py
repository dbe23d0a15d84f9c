"""Reinforcement fine-tuning: the model answers prompts, a grader gives each answer a reward, and answers that are
better than the others for their prompt become more likely (group relative policy optimisation: Shao et al., 2024,
arXiv:2402.03300), by OpenAI's schema of the method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.methods.method import Option
from train.methods.own_answers import ANSWER_OPTIONS, OwnAnswers

if TYPE_CHECKING:
    from train.plan.auto import Given

GROUP = 8
"""Answers of each prompt, as TRL and verl have it; `compute_multiplier` multiplies it."""


class Reinforcement(OwnAnswers):
    name = "reinforcement"
    summary = "learns from the rewards that a grader gives its answers"
    options = (
        Option(
            "compute_multiplier", 1e-5, 10, 1, f"answers of each prompt in a step are {GROUP} times this, at least 2"
        ),
        *ANSWER_OPTIONS,
    )
    judged_by = "grader"
    takes = ("grader", "response_format")
    # 1e-6 for all weights of 7e9 parameters, as TRL, verl and PipelineRL do.
    rate_share = 0.1

    @property
    def measured(self) -> tuple[str, ...]:
        return ("mean_reward", "equal_rewards")

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:
        super().own_hyperparameters(given, fields)
        effort = given.choice("reasoning_effort", ("default", "low", "medium", "high"), auto="default")
        if effort != "default":  # kept for the run to say that it changes nothing
            fields["options"]["reasoning_effort"] = effort

    def group(self, options: Mapping[str, Any]) -> int:
        return max(2, round(GROUP * options["compute_multiplier"]))


METHOD = Reinforcement()
