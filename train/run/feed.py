"""What each step of a run learns from: the rows of the data, or answers that the model samples in the step itself."""

from __future__ import annotations

from typing import Any, Protocol

from train.data.packing import Row, StepPlan
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.run.rollouts import Rollouts
from train.state.fragments import Grid


class Feed(Protocol):
    """Of the steps of one rank."""

    def ready(self, step: int) -> bool:
        """Collective: what this step learns from is there; False if the devices were wanted before."""

    def rows(self, step: int) -> list[tuple[int, Row]]:
        """(number within the step, row) of this rank's micro-batches. After `ready`, as all that follows."""

    def denominator(self, step: int) -> int:
        """What the loss of the step is divided by, the same on every rank."""

    def tokens(self, step: int) -> int:
        """That the step reads, over all ranks."""

    def told(self, step: int) -> dict[str, Any]:
        """Further data of the step's event, the same on every rank."""

    def seconds(self, step: int) -> dict[str, float]:
        """What making it ready took, by part."""


class DataFeed:
    """Learns what the data has."""

    def __init__(self, method: Method, plan: StepPlan, tokens: TokenSet, grid: Grid):
        self._method, self._plan, self._tokens, self._grid = method, plan, tokens, grid

    def ready(self, step: int) -> bool:
        return True

    def rows(self, step: int) -> list[tuple[int, Row]]:
        micro_batches = self._plan.micro_batches(step, self._grid.data_rank, self._grid.data_size)
        return [(number, self._tokens.row(micro)) for number, micro in micro_batches]

    def denominator(self, step: int) -> int:
        return self._method.denominator(self._tokens, self._plan.packs_of_step(step))

    def tokens(self, step: int) -> int:
        return self._tokens.tokens_in(self._plan.packs_of_step(step))

    def told(self, step: int) -> dict[str, Any]:
        return {}

    def seconds(self, step: int) -> dict[str, float]:
        return {}


class RolloutFeed:
    """Learns from the model's own answers."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts = rollouts

    def ready(self, step: int) -> bool:
        return self._rollouts.ready(step)

    def rows(self, step: int) -> list[tuple[int, Row]]:
        return [*self._rollouts.rows()]

    def denominator(self, step: int) -> int:
        return self._rollouts.denominator()

    def tokens(self, step: int) -> int:
        return self._rollouts.tokens()

    def told(self, step: int) -> dict[str, Any]:
        return self._rollouts.told()

    def seconds(self, step: int) -> dict[str, float]:
        return self._rollouts.seconds
