"""Odds ratio preference optimisation (Hong et al., 2024, arXiv:2403.07691): supervised tuning on the preferred output
of a pair, which also lowers the odds of the other output; without a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.methods.dpo import Pairs
from train.methods.method import Option

if TYPE_CHECKING:
    import torch

SUREST = -1e-6
"""The largest mean log-probability of a token whose odds are computed: those of a certain output are infinite."""


class Orpo(Pairs):
    name = "orpo"
    rate_share = 0.5  # 5e-6 for all weights of 7e9 parameters; TRL's example has 8e-6
    summary = "learns the preferred answer of each pair and avoids the other, without a reference model"
    options = (Option("beta", 1e-6, 10, 0.1, "weight of the odds ratio beside the preferred answer's own loss"),)
    metric_names = (
        "rewards/accuracies",
        "rewards/margins",
        "log_odds_chosen",
        "log_odds_ratio",
        "nll_loss",
        "logps/chosen",
        "logps/rejected",
    )

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Equations 6 and 7: the sum over pairs of -log p(preferred) - beta * log sigmoid(log odds ratio), where log p
        is the mean over an output's tokens."""
        import torch
        from torch.nn.functional import logsigmoid

        beta = options["beta"]
        tokens = torch.tensor(batch["sequence_sizes"], dtype=log_probs.dtype).to(log_probs.device, non_blocking=True)
        means = (log_probs / tokens).view(-1, 2)
        odds = means - torch.log(-torch.expm1(means.clamp(max=SUREST)))
        log_odds = odds[:, 0] - odds[:, 1]
        ratio, (chosen, rejected) = logsigmoid(log_odds), means.unbind(1)
        margins = beta * (chosen - rejected)
        values = [(margins > 0).float(), margins, log_odds, ratio, -chosen, chosen, rejected]
        return -(chosen + beta * ratio).sum(), values
