"""Methods that learn from the model's own answers, by a grader's rewards (reinforcement) or a teacher (distillation).

Both methods share the length of answers, the number of answers per prompt, the form in which engines serve the sampling
model, and the memory estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from train.data.records import BadRecord, Record
from train.methods.method import Method, Option
from train.plan import auto, estimate
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ELEMENT_BYTES

if TYPE_CHECKING:
    import torch

    from train.data.chat import ChatEncoder, Tokens
    from train.methods.method import Batch, Loss
    from train.plan.auto import DatasetStats, Given, ModelStats
    from train.plan.estimate import ModelShape, RankMemory

GROUP = 8
"""Answers to each prompt, as in TRL and verl; `compute_multiplier` multiplies it."""
WEIGHT_CAP = 2.0
"""The largest weight of a token that is likelier to the trainer than to the engine: truncated importance sampling
(Ionides, 2008) between sampler and trainer, with the cap of Yao et al., 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training"."""
_HOST_ROW, _DEVICE_ROW = 1024, 8192
"""Tokens of a row of answers, unless a single answer is longer."""
MOST_STALE = 4
"""The most updates between the weights that write an answer and those that learn from it. Each needs one more version
in shared memory, and one more slot for adapters of an engine."""

ANSWER_OPTIONS = (
    Option("eval_samples", 1, 64, 1, "answers of each prompt of the validation file"),
    Option("max_completion_tokens", 1, 131072, 256, "tokens that an answer may have"),
)
"""Options that all of these methods have."""


class OwnAnswers(Method):
    """The common base of both methods. `options` has "group", the number of answers to each prompt in a step, and
    "rows", the number of rows over which these answers are spread."""

    metric_names = ("mismatch_kl", "mismatch_mean", "clipped")
    data = "prompt"
    cut_refuses = True
    wide = True

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        # Each prompt is its own pack; its answers are packed.
        given = {"packing": False} | hyperparameters
        for name, value in (("packing", False), ("micro_batch", 1), ("sequence_parallel", 1)):
            if given.get(name, "auto") not in ("auto", None, value):
                raise InvalidHyperparameter(
                    name, given[name], f"{value!r}, because the answers to one prompt are trained together"
                )
        longest = dataset.longest_example_tokens
        return auto.resolve(given, dataset, model, max_devices, own=partial(self._own, longest=longest, model=model))

    def _own(self, given: Given, fields: dict[str, Any], longest: int, model: ModelStats) -> None:
        self.own_hyperparameters(given, fields)
        options = fields["options"]
        for name in ("eval_samples", "max_completion_tokens"):
            options[name] = int(options[name])
        options["policy"] = "version" if auto.why_no_adapter(model, fields) else "adapter"
        options["staleness"] = given.integer("staleness", 0, MOST_STALE, auto=0)
        fields["max_length"] = _length(given, options, longest, model.max_position_embeddings)
        row = _HOST_ROW if estimate.kind_of(model.device_kind).on_host else _DEVICE_ROW
        together = max(1, row // fields["max_length"])
        options["rows"] = next(n for n in range(1, options["group"] + 1) if math.ceil(options["group"] / n) <= together)

    def rank_memory(self, shape: ModelShape, fields: Mapping[str, Any], ranks: int) -> RankMemory:
        options = fields["options"]
        together = math.ceil(options["group"] / options["rows"])  # number of answers in a row
        row = {**fields, "max_length": together * fields["max_length"]}
        learning, element = estimate.rank_memory(shape, row, ranks), ELEMENT_BYTES[fields["precision"]]
        # The head computes in float32, including the gradient of its weight.
        head = 4 * shape.vocab * shape.hidden if element < 4 else 0
        head += estimate.head_bytes(shape, row, 4) - estimate.head_bytes(shape, row, element)
        head += together * fields["max_length"] * shape.vocab // 8  # a bit per label and vocabulary token, for forms
        return replace(learning, activations_bytes=head + learning.activations_bytes)

    def data_length(self, max_length: int, options: Mapping[str, Any]) -> int:
        return max_length - int(options["max_completion_tokens"])

    def policies(self, options: Mapping[str, Any]) -> int:
        return 0 if options["policy"] == "adapter" else 2 + int(options["staleness"])  # one version is being written

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]:
        ids = encoder.prompt(record)
        return [[(ids, ids < 0)]]  # no token of a prompt is trained

    def check_cut(self, sequences: Sequence[Tokens], max_length: int) -> None:
        """Raise BadRecord for a prompt that would be cut, since a prompt without its end is another prompt."""
        ((ids, _),) = sequences
        if len(ids) > max_length:
            raise BadRecord(
                f"the prompt has {len(ids)} tokens; at most {max_length} are possible besides max_completion_tokens: "
                "give a larger max_length, or shorten the prompt"
            )

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return the loss of group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300) in its common
        form: averaged over all tokens of the step (DAPO: Yu et al., 2025, arXiv:2503.14476), without a penalty for
        distance from the starting model.

        Engines round differently and may have the weights of an earlier step. So a token's ratio compares the trainer
        with the engine, not the model before and after the step. The ratio weights the token, up to WEIGHT_CAP; unlike
        clipping, it stops no gradient. A step trains on its samples once, so the trainer's own ratio is 1 wherever it
        is differentiated.
        """
        fixed = log_probs.detach()
        moved = fixed - batch["sampled"]
        ratio = moved.exp()
        surrogate = ratio.clamp(max=WEIGHT_CAP) * (log_probs - fixed).exp() * batch["advantages"]
        # The first metric is Schulman's (2020) estimate of KL(sampler, trainer): unbiased and never negative.
        return -surrogate.sum(), [ratio - 1 - moved, moved.abs(), (ratio > WEIGHT_CAP).float()]


class Reinforcement(OwnAnswers):
    """A grader gives each answer a reward; answers with larger rewards than others to their prompt become likelier
    (group relative policy optimisation: Shao et al., 2024, arXiv:2402.03300). Options follow OpenAI's schema."""

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
    measured = ("mean_reward", "equal_rewards")
    # 1e-6 for all weights of 7e9 parameters, as in TRL, verl and PipelineRL.
    rate_share = 0.1

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:
        super().own_hyperparameters(given, fields)
        effort = given.choice("reasoning_effort", ("default", "low", "medium", "high"), auto="default")
        if effort != "default":  # the run reports that the effort is ignored
            fields["options"]["reasoning_effort"] = effort
        fields["options"]["group"] = max(2, round(GROUP * fields["options"]["compute_multiplier"]))


class Distillation(OwnAnswers):
    """A teacher gives the log-probability of each token of the model's answers, and the model approaches the teacher on
    these answers.

    The loss is the reverse KL divergence of student and teacher at each token of the student's answers, in its
    policy-gradient form: the advantage of a sampled token is log p(teacher) - log p(student), without discounted later
    tokens, so the teacher gives one number for each token (Thinking Machines Lab, 2025, "On-Policy Distillation"; GKD,
    arXiv:2306.13649, TRL's beta 1 and lambda 1; MiniLLM, arXiv:2306.08543).
    """

    name = "distillation"
    summary = "learns from a teacher, which says how likely it finds what the model answers"
    options = (
        Option("samples", 1, 64, 4, "answers of each prompt in a step"),
        *ANSWER_OPTIONS,
    )
    judged_by = "teacher"
    takes = ("teacher",)
    measured = ("reverse_kl", "entropy")
    # Larger than for reinforcement, with one reward per answer, since here every token has its own signal.
    rate_share = 0.3

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:
        super().own_hyperparameters(given, fields)
        fields["options"]["group"] = int(fields["options"]["samples"])


def _length(given: Given, options: dict[str, Any], longest: int, most: int) -> int:
    """Return the most tokens of a prompt and its answer together."""
    answer = options["max_completion_tokens"]
    if not given.is_set("max_length"):
        # The token count of the longest prompt may be an estimate, with an error of up to a third.
        wanted = 32 * math.ceil(1.3 * longest / 32) + answer
        if answer >= most:
            raise InvalidHyperparameter(
                "max_completion_tokens", answer, f"less than the {most} tokens of the model's context"
            )
        return min(most, wanted)
    length = given.integer("max_length", 32, most, auto=most)
    if not given.is_set("max_completion_tokens"):
        answer = options["max_completion_tokens"] = min(answer, length // 2)
    if answer >= length:
        raise InvalidHyperparameter(
            "max_completion_tokens", answer, f"less than max_length {length}, which includes the prompt"
        )
    return length
