"""Methods that teach the model to prefer some outputs to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.data.records import BadRecord, Record
from train.methods.method import Method, Option

if TYPE_CHECKING:
    import torch

    from train.data.chat import ChatEncoder, Tokens
    from train.methods.method import Batch, Loss
    from train.plan.auto import DatasetStats, ModelStats

# Learning rate, as a share of that of supervised tuning: gives 5e-7 for full tuning of 7e9 parameters and 5e-6 for
# adapters, as in TRL and the alignment handbook.
RATE_SHARE = 0.05
# Few pairs make few steps, in which the published rate changes nothing: training on 12 pairs gave a margin of 0.0004.
LARGEST_SHARE, SHARE_FROM_PAIRS = 0.1, 300
_FEW_PAIRS = 1000
SUREST = -1e-6
"""The largest mean log-probability of a token for odds: the odds of a certain output are infinite."""
BETA = Option("beta", 1e-6, 2, 0.1, "how closely the model stays to its start; a smaller value strays further")


class Compared(Method):
    """Base of methods that compare the model with its starting model, with a small share of the learning rate."""

    needs_reference = True

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        """Do what `Method.resolve` does, with other defaults for epochs and learning rate."""
        n = dataset.n_examples
        if hyperparameters.get("n_epochs", "auto") in ("auto", None):
            # With more passes the model becomes certain of the examples that it saw, and of little else.
            few = max(3, min(10, SHARE_FROM_PAIRS // n))
            hyperparameters = {**hyperparameters, "n_epochs": few if n < _FEW_PAIRS else 1}
        fields = super().resolve(hyperparameters, dataset, model, max_devices)
        if hyperparameters.get("learning_rate", "auto") in ("auto", None):
            fields["learning_rate"] *= min(LARGEST_SHARE, RATE_SHARE * max(1.0, SHARE_FROM_PAIRS / n))
        return fields


class Pairs(Method):
    """Base of methods whose example is a pair of outputs for one conversation."""

    data = "preference"
    by_example = True
    sequences = 2  # the preferred output, then the non-preferred one
    cut_refuses = True

    def check_cut(self, sequences: Sequence[Tokens], max_length: int) -> None:
        """Raise BadRecord if, after the cut, a pair has nothing to compare."""
        short = [(ids[:max_length], learnt[:max_length]) for ids, learnt in sequences]
        for side, (_, learnt) in zip(("preferred", "non-preferred"), short, strict=True):
            if not learnt[1:].any():
                raise BadRecord(
                    f"the {side} output begins after the {max_length} tokens of max_length, so all of it would be cut: "
                    "give a larger max_length, or shorten the input"
                )
        (first, _), (second, _) = short
        if len(first) == len(second) and (first == second).all():
            raise BadRecord(
                f"both outputs are the same tokens within max_length {max_length}, so there is nothing to prefer"
            )


class Dpo(Compared, Pairs):
    """Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290): the model learns to prefer the first of
    two outputs for one conversation, compared with the starting model."""

    name = "dpo"
    summary = "learns to prefer one answer to another, from pairs of them"
    options = (BETA,)
    metric_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return equation 7 as in TRL's DPOTrainer with loss_type "sigmoid": the sum over pairs of -log
        sigmoid(margin). margin: the preferred output's reward minus the other output's reward. reward: beta times
        (log-probability of an output's trained tokens minus reference)."""
        from torch.nn.functional import logsigmoid

        rewards = options["beta"] * (log_probs - batch["reference"]).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        metrics = [*rewards.unbind(1), (margins > 0).float(), margins, *log_probs.view(-1, 2).unbind(1)]
        return -logsigmoid(margins).sum(), metrics


class Kto(Compared):
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306): learns from single answers that are
    marked good or bad."""

    name = "kto"
    summary = "learns from single answers that are each marked good or bad"
    options = (
        BETA,
        Option("desirable_weight", 0, 100, 1, "weight of the good answers' loss"),
        Option("undesirable_weight", 0, 100, 1, "weight of the bad answers' loss"),
    )
    metric_names = ("rewards/accuracies", "rewards/margins", "kl", "logps")
    needs_divergence = True
    by_example = True
    data = "unpaired"

    @property
    def measured(self) -> tuple[str, ...]:
        return self.metric_names  # not the token accuracy, which would count tokens of bad answers too

    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]:
        ids, learnt = encoder.encode_whole(record["sequences"][0])
        learnt = learnt.copy()
        learnt[0] = record["label"]  # becomes Row.marks
        return [[(ids, learnt)]]

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return the sum over answers of weight * (1 - sigmoid(margin)), as TRL's KTOTrainer except for the KL term.

        margin: beta * (log-ratio to the reference - KL term), negated for a bad answer. KL term: the mean log-ratio of
        all answers of the step, at least 0, without a gradient.
        """
        import torch

        kl = batch["divergence"].clamp(min=0)
        good = torch.tensor(batch["marks"]).to(log_probs.device, non_blocking=True)
        above = options["beta"] * (log_probs - batch["reference"] - kl)
        margins = torch.where(good, above, -above)
        weights = torch.where(good, options["desirable_weight"], options["undesirable_weight"])
        values = [(margins > 0).float(), margins, kl.expand_as(margins), log_probs]
        return (weights * torch.sigmoid(-margins)).sum(), values


class Orpo(Pairs):
    """Odds ratio preference optimisation (Hong et al., 2024, arXiv:2403.07691): supervised tuning on the preferred
    output of a pair, which also lowers the odds of the other output; without a reference model."""

    name = "orpo"
    rate_share = 0.5  # gives 5e-6 for full tuning of 7e9 parameters; TRL's example has 8e-6
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

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return equations 6 and 7: the sum over pairs of -log p(preferred) - beta * log sigmoid(log odds ratio), where
        log p is the mean over an output's tokens."""
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
