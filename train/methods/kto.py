"""Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306): from answers that are each marked good or
bad, without pairs, the model comes to prefer good ones, compared with the model that it started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.data.records import Record
from train.methods.dpo import Compared
from train.methods.method import Option

if TYPE_CHECKING:
    import numpy as np
    import torch

    from train.data.chat import ChatEncoder, Tokens
    from train.data.token_set import TokenSet


class Kto(Compared):
    name = "kto"
    summary = "learns from single answers that are each marked good or bad"
    options = (
        Option("beta", 1e-6, 2, 0.1, "how closely it keeps to the model it starts from; smaller strays further"),
        Option("desirable_weight", 0, 100, 1, "weight of the good answers' loss"),
        Option("undesirable_weight", 0, 100, 1, "weight of the bad answers' loss"),
    )
    metric_names = ("rewards/accuracies", "rewards/margins", "kl", "logps")
    needs_divergence = True
    data = "unpaired"

    @property
    def measured(self) -> tuple[str, ...]:
        return self.metric_names  # the accuracy of tokens counts those of bad answers too

    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]:
        ids, learnt = encoder.encode_whole(record["sequences"][0])
        learnt = learnt.copy()
        learnt[0] = record["label"]  # Row.marks has it from here
        return [[(ids, learnt)]]

    def denominator(self, tokens: TokenSet, packs: np.ndarray) -> int:
        return tokens.examples_in(packs)

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum over answers of weight * (1 - sigmoid(margin)), as TRL's KTOTrainer has it but for the KL term.

        margin: beta times the log-ratio to the reference above the KL term, or below it for a bad answer. The KL term
        is the mean log-ratio of the whole step's answers, at least 0, and has no gradient.
        """
        import torch

        kl = batch["divergence"].clamp(min=0)
        good = torch.tensor(batch["marks"]).to(log_probs.device, non_blocking=True)
        above = options["beta"] * (log_probs - batch["reference"] - kl)
        margins = torch.where(good, above, -above)
        weights = torch.where(good, options["desirable_weight"], options["undesirable_weight"])
        values = [(margins > 0).float(), margins, kl.expand_as(margins), log_probs]
        return (weights * torch.sigmoid(-margins)).sum(), values
