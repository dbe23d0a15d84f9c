"""The loss of group relative policy optimisation (Shao et al., 2024, arXiv:2402.03300) as the field has settled on it:
token by token over all tokens of the step (DAPO: Yu et al., 2025, arXiv:2503.14476), the ratio against the
log-probabilities that were recorded when the tokens were sampled, clipped, and without a penalty for distance from the
starting model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from train.data.packing import RolloutRow, Row
from train.methods import packed_objective
from train.methods.packed_objective import LogProbHead, PackedObjective

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far the probability of a token may move from the sampled one before it moves no further: PPO's 0.2 below, DAPO's
0.28 above."""
TRUNCATED_AT = 3.0
"""The largest ratio that counts where the advantage is below 0, else one token could outweigh a whole step (dual-clip
PPO: Ye et al., 2020, arXiv:1912.09729)."""


class Float32LogProbHead(LogProbHead):
    """Computes logits in float32 whatever the weights are: rounded to bfloat16, log-probabilities of trainer and
    sampler differ by more than a step changes them."""

    wide = True

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return functional.linear(hidden.float(), self.weight.float())
        return super().forward(hidden, labels)


class ReinforcementObjective(PackedObjective):
    """A row's sequences are prompts with answers that the model has sampled, of which the answers are learnt."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, Float32LogProbHead)
        self._seen: list[torch.Tensor] = []

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Minus the sum of the clipped surrogate over the row's learnt tokens, times batch["scale"]; float32 scalar."""
        moved = self.log_probs(batch) - batch["sampled"]
        ratio, advantages = moved.exp(), batch["advantages"]
        plain = ratio * advantages
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages
        surrogate = torch.minimum(plain, clipped)
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, TRUNCATED_AT * advantages), surrogate)
        with torch.no_grad():
            # The unbiased estimate of KL(sampler, trainer) that is never negative (Schulman, 2020).
            told = [(ratio - 1 - moved).sum(), (surrogate != plain).float().sum()]
            self._seen.append(torch.stack(told) * batch["scale"])
        return -surrogate.sum() * batch["scale"]

    def take_metrics(self) -> list[float]:
        """Means over the tokens of the step, as far as this rank has seen them; in the order of
        Reinforcement.metric_names."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).sum(0).tolist() if seen else [0.0] * 2


def to_batch(row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
    """As `packed_objective.to_batch`, with advantages and sampled, (n,) float32 of the labels."""
    assert isinstance(row, RolloutRow)
    advantages = torch.from_numpy(row.advantages).repeat_interleave(torch.tensor(row.sequence_sizes))
    return {
        **packed_objective.to_batch(row, scale, device),
        "advantages": advantages.to(device, non_blocking=True),
        "sampled": torch.from_numpy(row.sampled).to(device, non_blocking=True),
    }
