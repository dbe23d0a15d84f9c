"""The loss of direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290, equation 7), as TRL's DPOTrainer
computes it with loss_type "sigmoid"."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from train.methods.packed_objective import LogProbHead, PackedObjective


class DpoObjective(PackedObjective):
    """A pair is two sequences of a row, the preferred one first."""

    def __init__(self, model: PreTrainedModel, beta: float):
        super().__init__(model, LogProbHead)
        self.beta = beta
        self._seen: list[torch.Tensor] = []

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Sum over the row's pairs of -log sigmoid(margin), times batch["scale"]; a float32 scalar. margin: the reward
        of the preferred output less that of the other; reward: beta times the log-probability of the output's learnt
        tokens, less the reference. For a batch without a reference, these log-probabilities, (sequences,) float32."""
        # Not index_add, whose order of addition differs from run to run on a GPU.
        parts = self.log_probs(batch).split(list(batch["sequence_sizes"]))
        log_probs = torch.stack([part.sum() for part in parts])
        if batch["reference"] is None:
            return log_probs
        rewards = self.beta * (log_probs - batch["reference"]).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        with torch.no_grad():
            each = [*rewards.unbind(1), (margins > 0).float(), margins, *log_probs.view(-1, 2).unbind(1)]
            self._seen.append(torch.stack([values.sum() for values in each]) * batch["scale"])
        return -logsigmoid(margins).sum() * batch["scale"]

    def take_metrics(self) -> list[float]:
        """Means over the pairs of the step, as far as this rank has seen them; in the order of Dpo.metric_names."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).sum(0).tolist() if seen else [0.0] * 6
