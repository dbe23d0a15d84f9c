"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290): of two outputs for one conversation the
model comes to prefer the first, compared with the model that it started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.data.records import BadRecord
from train.methods.method import Method, Option

if TYPE_CHECKING:
    import numpy as np
    import torch

    from train.data.chat import Tokens
    from train.data.token_set import TokenSet
    from train.plan.auto import DatasetStats, ModelStats

# The share of the rate that suits supervised tuning: 5e-7 for full tuning of 7e9 parameters and 5e-6 for adapters, as
# TRL and the alignment handbook have it.
RATE_SHARE = 0.05
# Few pairs make few steps, in which the published share moves nothing: 12 pairs ended at a margin of 0.0004.
LARGEST_SHARE, SHARE_FROM_PAIRS = 0.1, 300
_FEW_PAIRS = 1000


class Compared(Method):
    """The model is compared with the one that it started from. A small share of the common learning rate suits that."""

    needs_reference = True

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        """Keeps what a request has set."""
        n = dataset.n_examples
        if hyperparameters.get("n_epochs", "auto") in ("auto", None):
            # More passes than these make the model sure of the examples it has seen, and of little else.
            few = max(3, min(10, SHARE_FROM_PAIRS // n))
            hyperparameters = {**hyperparameters, "n_epochs": few if n < _FEW_PAIRS else 1}
        fields = super().resolve(hyperparameters, dataset, model, max_devices)
        if hyperparameters.get("learning_rate", "auto") in ("auto", None):
            fields["learning_rate"] *= min(LARGEST_SHARE, RATE_SHARE * max(1.0, SHARE_FROM_PAIRS / n))
        return fields


class Pairs(Method):
    """An example is a pair of outputs for one conversation. The loss of a step is divided by its pairs."""

    data = "preference"
    sequences = 2  # the preferred output, then the other
    cut_refuses = True

    def check_cut(self, sequences: Sequence[Tokens], max_length: int) -> None:
        """Raises BadRecord for a pair of which a cut leaves nothing to compare."""
        short = [(ids[:max_length], learnt[:max_length]) for ids, learnt in sequences]
        for side, (_, learnt) in zip(("preferred", "non-preferred"), short, strict=True):
            if not learnt[1:].any():
                raise BadRecord(
                    f"the {side} output begins behind the {max_length} tokens of max_length, so nothing is left of it: "
                    "give a larger max_length, or shorten the input"
                )
        (first, _), (second, _) = short
        if len(first) == len(second) and (first == second).all():
            raise BadRecord(
                f"both outputs are the same tokens within max_length {max_length}, so there is nothing to prefer"
            )

    def denominator(self, tokens: TokenSet, packs: np.ndarray) -> int:
        return tokens.examples_in(packs)


class Dpo(Compared, Pairs):
    name = "dpo"
    summary = "learns to prefer one answer to another, from pairs of them"
    options = (
        Option("beta", 1e-6, 2, 0.1, "how closely it keeps to the model it starts from; smaller strays further"),
    )
    metric_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Equation 7, as TRL's DPOTrainer computes it with loss_type "sigmoid": the sum over pairs of
        -log sigmoid(margin). margin: the reward of the preferred output less that of the other; reward: beta times the
        log-probability of the output's learnt tokens, less the reference."""
        from torch.nn.functional import logsigmoid

        rewards = options["beta"] * (log_probs - batch["reference"]).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        metrics = [*rewards.unbind(1), (margins > 0).float(), margins, *log_probs.view(-1, 2).unbind(1)]
        return -logsigmoid(margins).sum(), metrics
