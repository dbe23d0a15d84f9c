"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290): of two outputs for one conversation the
model comes to prefer the first, compared with the model that it started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.data.formats import BadRecord, Record
from train.data.preferences import pair
from train.methods.method import Method, Option

if TYPE_CHECKING:
    import numpy as np
    import torch

    from train.data.token_set import Tokens, TokenSet
    from train.plan.auto import DatasetStats, Given, ModelStats

# Of the rate that suits supervised tuning: 5e-7 for full tuning of 7e9 parameters and 5e-6 for adapters, as TRL and the
# alignment handbook have it.
RATE_SHARE = 0.05
_FEW_PAIRS = 1000


class Dpo(Method):
    name = "dpo"
    summary = "learns to prefer one answer to another, from pairs of them"
    options = (
        Option("beta", 1e-6, 2, 0.1, "how closely it keeps to the model it starts from; smaller strays further"),
    )
    metric_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )
    sequences = 2  # the preferred answer, then the other
    needs_reference = True

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        # More passes than these make the model sure of the pairs it has seen, and of little else.
        if hyperparameters.get("n_epochs", "auto") in ("auto", None):
            hyperparameters = {**hyperparameters, "n_epochs": 3 if dataset.n_examples < _FEW_PAIRS else 1}
        return super().resolve(hyperparameters, dataset, model, max_devices)

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:
        super().own_hyperparameters(given, fields)
        if not given.is_set("learning_rate"):
            fields["learning_rate"] *= RATE_SHARE

    def refuses(self, shape: str) -> str | None:
        if shape != "preference":
            return f"has the shape {shape!r}; the method {self.name!r} wants pairs of outputs, one preferred"
        return None

    def convert(self, record: Record, shape: str) -> Record | None:
        return {"sequences": pair(record)} if self.refuses(shape) is None else None

    def cut(self, sequences: Sequence[Tokens], max_length: int) -> Sequence[Tokens] | None:
        """Raises BadRecord for a pair of which a cut leaves nothing to compare."""
        short = [(ids[:max_length], learnt[:max_length]) for ids, learnt in sequences]
        for side, whole, (_, learnt) in zip(("preferred", "non-preferred"), sequences, short, strict=True):
            if not learnt[1:].any():
                raise BadRecord(
                    f"the {side} output begins after token {_first_learnt(whole)}; of max_length {max_length} tokens "
                    "nothing is left for it: give a larger max_length, or shorten the input"
                )
        (first, _), (second, _) = short
        if len(first) == len(second) and (first == second).all():
            raise BadRecord(
                f"both outputs are the same tokens within max_length {max_length}, so there is nothing to prefer"
            )
        return short

    def denominator(self, tokens: TokenSet, packs: np.ndarray) -> int:
        return tokens.examples_in(packs)

    def objective(self, model: Any, options: Mapping[str, Any]) -> torch.nn.Module:
        from train.methods.dpo_objective import DpoObjective

        return DpoObjective(model, options["beta"])

    def metrics(self, objective: torch.nn.Module) -> list[float]:
        return objective.take_metrics()


def _first_learnt(sequence: Tokens) -> int:
    _, learnt = sequence
    return int(learnt[1:].argmax()) + 1 if learnt[1:].any() else len(learnt)


METHOD = Dpo()
