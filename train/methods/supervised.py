"""Supervised fine-tuning: the cross entropy of what the assistant says, on conversations of any shape we know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.methods.method import Method

if TYPE_CHECKING:
    import torch


class Supervised(Method):
    name = "supervised"
    summary = "learns what the assistant says in conversations"
    sums = True

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum of the cross entropy of all trained tokens."""
        return -log_probs.sum(), []


METHOD = Supervised()
