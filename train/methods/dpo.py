"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290): of two outputs for one conversation the
model comes to prefer the first, compared with the model that it started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.methods.method import Option
from train.methods.pairs import Pairs

if TYPE_CHECKING:
    import torch

    from train.plan.auto import DatasetStats, ModelStats

# The share of the rate that suits supervised tuning: 5e-7 for full tuning of 7e9 parameters and 5e-6 for adapters, as
# TRL and the alignment handbook have it.
RATE_SHARE = 0.05
# Few pairs make few steps, in which the published share moves nothing: 12 pairs ended at a margin of 0.0004.
LARGEST_SHARE, SHARE_FROM_PAIRS = 0.1, 300
_FEW_PAIRS = 1000


def gentle(hyperparameters: dict[str, Any], n_examples: int) -> tuple[dict[str, Any], float]:
    """The hyperparameters with the passes over this many examples, and the factor of the common learning rate; both
    keep what a request has set."""
    if hyperparameters.get("n_epochs", "auto") in ("auto", None):
        # More passes than these make the model sure of the examples it has seen, and of little else.
        few = max(3, min(10, SHARE_FROM_PAIRS // n_examples))
        hyperparameters = {**hyperparameters, "n_epochs": few if n_examples < _FEW_PAIRS else 1}
    share = min(LARGEST_SHARE, RATE_SHARE * max(1.0, SHARE_FROM_PAIRS / n_examples))
    return hyperparameters, share if hyperparameters.get("learning_rate", "auto") in ("auto", None) else 1.0


class Dpo(Pairs):
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
    needs_reference = True

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        given, rate_share = gentle(hyperparameters, dataset.n_examples)
        fields = super().resolve(given, dataset, model, max_devices)
        return {**fields, "learning_rate": fields["learning_rate"] * rate_share}

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Equation 7, as TRL's DPOTrainer computes it with loss_type "sigmoid": the sum over pairs of
        -log sigmoid(margin). margin: the reward of the preferred output less that of the other; reward: beta times the
        log-probability of the output's learnt tokens, less the reference."""
        from torch.nn.functional import logsigmoid

        rewards = options["beta"] * (log_probs - batch["reference"]).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        told = [*rewards.unbind(1), (margins > 0).float(), margins, *log_probs.view(-1, 2).unbind(1)]
        return -logsigmoid(margins).sum(), told


METHOD = Dpo()
