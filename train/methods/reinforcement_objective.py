"""The loss of group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300) as the field has settled on it:
token by token over all tokens of the step (DAPO: Yu et al., 2025, arXiv:2503.14476), each weighed by how likely it is
to the trainer against the engine that sampled it, and without a penalty for distance from the starting model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from train.data.packing import Row
from train.methods import packed_objective
from train.methods.packed_objective import LogProbHead, PackedObjective

WEIGHT_CAP = 2.0
"""The most that a token of an engine counts for being likelier to the trainer than to the engine: truncated importance
sampling (Ionides, 2008) between sampler and trainer, with the cap of Yao et al., 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training"."""


class Float32LogProbHead(LogProbHead):
    """Computes logits in float32 whatever the weights are: rounded to bfloat16, log-probabilities of trainer and
    sampler differ by more than a step changes them."""

    wide = True

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        if labels is None:
            return functional.linear(hidden.float(), self.weight.float())
        return super().forward(hidden, labels, allowed)


class ReinforcementObjective(PackedObjective):
    """A row's sequences are prompts with answers that the model has sampled, of which the answers are learnt.

    An engine's kernels round otherwise, and it may have the weights of a step before, so that a token's ratio says how
    far the two samplers differ, not how far the step has moved: it weighs the token, up to WEIGHT_CAP, and stops no
    gradient, as clipping would. The samples of a step are learnt from once, so the trainer's own ratio is 1 wherever it
    is differentiated.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, Float32LogProbHead)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Minus the sum of the surrogate over the row's learnt tokens, times batch["scale"]; float32 scalar."""
        (log_probs, _), advantages = self.log_probs(batch), batch["advantages"]
        moved = log_probs - batch["sampled"]
        ratio = moved.detach().exp()
        surrogate = ratio.clamp(max=WEIGHT_CAP) * (log_probs - log_probs.detach()).exp() * advantages
        with torch.no_grad():
            # The unbiased estimate of KL(sampler, trainer) that is never negative (Schulman, 2020).
            metrics = [(ratio - 1 - moved).sum(), moved.abs().sum(), (ratio > WEIGHT_CAP).float().sum()]
            self.report(metrics, batch["scale"], [moved.abs().max()])
        return -surrogate.sum() * batch["scale"]


def to_batch(row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
    """As `packed_objective.to_batch`, with advantages and sampled, (n,) float32 of the labels, and `allowed`."""
    assert row.advantages is not None and row.sampled is not None
    allowed = None if row.allowed is None else torch.from_numpy(row.allowed()).to(device, non_blocking=True)
    return {
        **packed_objective.to_batch(row, scale, device),
        "allowed": allowed,
        "advantages": torch.from_numpy(row.advantages).to(device, non_blocking=True),
        "sampled": torch.from_numpy(row.sampled).to(device, non_blocking=True),
    }
