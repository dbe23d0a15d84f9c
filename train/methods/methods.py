"""Defines the table of methods, and the simplest method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.methods.method import Method
from train.methods.own_answers import Distillation, Reinforcement
from train.methods.preferences import Dpo, Kto, Orpo
from train.plan.errors import InvalidSpec

if TYPE_CHECKING:
    import torch

    from train.methods.method import Batch, Loss


class Supervised(Method):
    """Supervised tuning: cross entropy of the assistant's turns, in conversations of any known shape."""

    name = "supervised"
    summary = "learns what the assistant says in conversations"
    sums = True

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return the cross entropy, summed over all trained tokens."""
        return -log_probs.sum(), []


DEFAULT = Supervised()
METHODS: dict[str, Method] = {row.name: row for row in (DEFAULT, Dpo(), Kto(), Orpo(), Reinforcement(), Distillation())}


def method_of(name: str) -> Method:
    """Return the method of this name. Raises InvalidSpec for an unknown name."""
    try:
        return METHODS[name]
    except KeyError:
        raise InvalidSpec(f"method {name!r} is not known; expected one of {', '.join(METHODS)}") from None
