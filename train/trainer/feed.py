"""Feeds the steps of a rank with rows of the data. Rollouts (train.rollouts.rollouts) have the same methods, for
answers that engines sample from the model in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from train.data.packing import Row, StepPlan, part_of
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.state.fragments import Grid


class DataFeed:
    """All methods but `ready` are about the step of its last call."""

    def __init__(self, method: Method, plan: StepPlan, tokens: TokenSet, grid: Grid, sequence_parallel: int = 1):
        """sequence_parallel: neighbouring ranks that share each row, a part of its tokens each."""
        self._method, self._plan, self._tokens, self._grid = method, plan, tokens, grid
        self._parts = sequence_parallel
        self._step = -1

    def ready(self, step: int) -> bool:
        """Collective: fetch what this step learns from. False if the devices were wanted before it was there."""
        self._step = step
        return True

    def rows(self) -> list[tuple[int, Row]]:
        """(number within the step, row) of this rank's micro-batches."""
        group, part = divmod(self._grid.data_rank, self._parts)
        micro_batches = self._plan.micro_batches(self._step, group, self._grid.data_size // self._parts)
        return [(number, part_of(self._row(number, micro), part, self._parts)) for number, micro in micro_batches]

    def _row(self, number: int, packs: np.ndarray) -> Row:
        learnt = packs[: max(0, self._plan.counted(self._step) - number * len(packs))]
        return self._tokens.row(learnt) if len(learnt) else replace(self._tokens.row(packs), weight=0.0)

    def denominator(self) -> int:
        """What the loss of the step is divided by, the same on every rank."""
        return self._method.denominator(self._tokens, self._plan.learnt_in_step(self._step))

    def tokens(self) -> int:
        """How many tokens the step learns from, with those before them, over all ranks."""
        return self._tokens.tokens_in(self._plan.learnt_in_step(self._step))

    def step_metrics(self) -> dict[str, Any]:
        """Further data of the step's event, the same on every rank."""
        return {}

    def seconds(self) -> dict[str, float]:
        """How many seconds `ready` took, by part."""
        return {}
