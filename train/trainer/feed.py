"""Provides what each step of a run learns from: rows of the data, or answers that engines sample from the model in
training (train.rollouts.rollouts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from train.data.packing import Row, StepPlan
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.state.fragments import Grid


class Feed(Protocol):
    """Feeds the steps of one rank. The other methods are about the step of the last `ready`."""

    def ready(self, step: int) -> bool:
        """Collective: fetch what this step learns from. False if the devices were wanted before it was there."""

    def rows(self) -> list[tuple[int, Row]]:
        """(number within the step, row) of this rank's micro-batches."""

    def denominator(self) -> int:
        """What the loss of the step is divided by, the same on every rank."""

    def tokens(self) -> int:
        """How many tokens the step learns from, with those before them, over all ranks."""

    def step_metrics(self) -> dict[str, Any]:
        """Return further data of the step's event, the same on every rank."""

    def seconds(self) -> dict[str, float]:
        """How many seconds `ready` took, by part."""


class DataFeed:
    """Feeds the rows of the data."""

    def __init__(self, method: Method, plan: StepPlan, tokens: TokenSet, grid: Grid):
        self._method, self._plan, self._tokens, self._grid = method, plan, tokens, grid
        self._step = -1

    def ready(self, step: int) -> bool:
        self._step = step
        return True

    def rows(self) -> list[tuple[int, Row]]:
        micro_batches = self._plan.micro_batches(self._step, self._grid.data_rank, self._grid.data_size)
        return [(number, self._row(number, micro)) for number, micro in micro_batches]

    def _row(self, number: int, packs: np.ndarray) -> Row:
        learnt = packs[: max(0, self._plan.counted(self._step) - number * len(packs))]
        return self._tokens.row(learnt) if len(learnt) else replace(self._tokens.row(packs), weight=0.0)

    def denominator(self) -> int:
        return self._method.denominator(self._tokens, self._plan.learnt_in_step(self._step))

    def tokens(self) -> int:
        return self._tokens.tokens_in(self._plan.learnt_in_step(self._step))

    def step_metrics(self) -> dict[str, Any]:
        return {}

    def seconds(self) -> dict[str, float]:
        return {}
