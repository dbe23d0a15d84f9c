"""On-policy distillation: the model answers prompts, a teacher says how likely each token of an answer is to it, and
the model comes nearer to the teacher where it goes itself.

The loss is the reverse KL divergence of student and teacher at each token of the student's own answers, in its
policy-gradient form: the advantage of a sampled token is log p(teacher) - log p(student), nothing is discounted over
later tokens, and the teacher needs to say no more than one number for each token (Thinking Machines Lab, 2025,
"On-Policy Distillation"; Agarwal et al., 2023, arXiv:2306.13649, GKD, with beta 1 and lambda 1 in TRL's words; Gu et
al., 2023, arXiv:2306.08543, MiniLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.methods.method import Option
from train.methods.own_answers import ANSWER_OPTIONS, OwnAnswers


class Distillation(OwnAnswers):
    name = "distillation"
    summary = "learns from a teacher, which says how likely it finds what the model answers"
    options = (
        Option("samples", 1, 64, 4, "answers of each prompt in a step"),
        *ANSWER_OPTIONS,
    )
    judged_by = "teacher"
    takes = ("teacher",)
    # Larger than with one reward for a whole answer: every token has a signal of its own.
    rate_share = 0.3

    @property
    def measured(self) -> tuple[str, ...]:
        return ("reverse_kl", "entropy")

    def group(self, options: Mapping[str, Any]) -> int:
        return int(options["samples"])


METHOD = Distillation()
