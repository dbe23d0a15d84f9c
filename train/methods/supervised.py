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

    def refuses(self, shape: str) -> str | None:
        if shape == "preference":
            return f"has preference pairs; the method {self.name!r} wants conversations; the method 'dpo' takes pairs"
        if shape == "unpaired":
            return (
                f"has a mark of good and bad answers ('label'); the method {self.name!r} wants good answers, without "
                "a mark; the method 'kto' takes marks"
            )
        if shape == "prompt":
            return f"ends with a message from the user; the method {self.name!r} wants the answer that is to be learnt"
        return None

    def loss(
        self, log_probs: torch.Tensor, batch: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum of the cross entropy of all trained tokens."""
        return -log_probs.sum(), []


METHOD = Supervised()
