"""Defines the interface of a training method. A new one is a subclass in its own file and a row in `methods`.

Methods in the order of use, from the request to the loss:

    resolve          hyperparameters into fields of a TrainSpec
    convert, refuses records of the data file, as they are checked and written for the run
    rank_memory      what a rank takes
    encode, row      a record into tokens, and examples of tokens into one micro-batch
    objective, batch the module whose forward is the loss, and what it takes
    metrics          what it reports beside the loss
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.data.formats import Record
from train.data.packing import Row, build_row
from train.plan import auto, estimate
from train.plan.auto import DatasetStats, Given, ModelStats
from train.plan.estimate import ModelShape, RankMemory

if TYPE_CHECKING:
    import numpy as np
    import torch

    from train.data.chat import ChatEncoder


class Method(ABC):
    """`name`: as OpenAI's `method.type` and in a TrainSpec. `metric_names`: of the values of `metrics`, in order."""

    name: str
    metric_names: tuple[str, ...] = ()

    # -- before the run: in the controller, without torch -----------------------------------------------------------

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        """Fields of a TrainSpec. Raises InvalidHyperparameter for an unknown name or a value out of range."""
        return auto.resolve(hyperparameters, dataset, model, max_devices, own=self.own_hyperparameters)

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:  # noqa: B027 - many have none
        """Read this method's own hyperparameters into `fields["options"]` (TrainSpec.options, plain JSON values), and
        override unsuitable common defaults. Raises InvalidHyperparameter."""

    @abstractmethod
    def convert(self, record: Record, shape: str) -> Record | None:
        """Convert a record for `encode`; None if the shape belongs to another method and is only checked. Raises
        BadRecord."""

    @abstractmethod
    def refuses(self, shape: str) -> str | None:
        """Why this method cannot train on a file of records of this shape (train.data.formats)."""

    def rank_memory(self, shape: ModelShape, fields: Mapping[str, Any], ranks: int) -> RankMemory:
        """What each of `ranks` ranks holds; `fields` as `resolve` makes them."""
        return estimate.rank_memory(shape, fields, ranks)

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def encode(self, encoder: ChatEncoder, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """(token ids (n,) int32, learnt (n,) bool) of one converted record. Raises BadRecord."""
        return encoder.encode(record)

    def row(
        self, packs: list[list[tuple[np.ndarray, np.ndarray]]], capacity: int, pad_id: int, *, packing: bool
    ) -> Row:
        """One micro-batch of packs of encoded records."""
        return build_row(packs, capacity, pad_id, packing=packing)

    @abstractmethod
    def objective(self, model: Any, options: Mapping[str, Any]) -> torch.nn.Module:
        """Wraps the model, as its attribute `model`; forward(batch) is the loss of one micro-batch, a float32 scalar.
        `options`: TrainSpec.options."""

    @abstractmethod
    def batch(self, row: Row, scale: float, device: torch.device | str) -> Any:
        """What the objective takes. `scale` is 1 / learnt tokens of the whole global step."""

    def metrics(self, objective: torch.nn.Module) -> list[float]:
        """Of the micro-batches since it was asked last, one for each of `metric_names`; they are summed over all ranks
        and reported with the step."""
        return []
