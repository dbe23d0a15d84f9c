"""The table of methods, and the simplest method."""

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
    """The cross entropy of the assistant's turns, in conversations of any known shape."""

    name = "supervised"
    summary = "learns what the assistant says in conversations"
    sums = True

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """The sum of the cross entropy of all trained tokens."""
        return -log_probs.sum(), []


DEFAULT = Supervised()
METHODS: dict[str, Method] = {row.name: row for row in (DEFAULT, Dpo(), Kto(), Orpo(), Reinforcement(), Distillation())}


def method_of(name: str) -> Method:
    """Raises InvalidSpec."""
    try:
        return METHODS[name]
    except KeyError:
        raise InvalidSpec(f"method {name!r} is not known; expected one of {', '.join(METHODS)}") from None
