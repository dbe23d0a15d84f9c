"""Supervised fine-tuning: the cross entropy of what the assistant says, on conversations of any shape we know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.data.formats import Record, conversation
from train.data.packing import Row
from train.methods.method import Method

if TYPE_CHECKING:
    import torch


class Supervised(Method):
    name = "supervised"

    def convert(self, record: Record, shape: str) -> Record | None:
        return conversation(record, shape)

    def refuses(self, shape: str) -> str | None:
        if shape == "preference":
            return "has preference pairs; the method 'supervised' wants conversations"
        return None

    def objective(self, model: Any, options: Mapping[str, Any]) -> torch.nn.Module:
        from train.methods.supervised_objective import SupervisedObjective

        return SupervisedObjective(model)

    def batch(self, row: Row, scale: float, device: torch.device | str) -> dict[str, Any]:
        from train.methods.supervised_objective import to_batch

        return to_batch(row, scale, device)


METHOD = Supervised()
