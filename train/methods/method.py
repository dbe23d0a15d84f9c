"""Defines the interface of a training method; members are in the order of use, from the request to the loss. A new
method is a subclass in its own file and a row in `methods`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from train.plan import auto, estimate
from train.plan.errors import InvalidHyperparameter

if TYPE_CHECKING:
    import numpy as np
    import torch

    from train.data.chat import ChatEncoder, Tokens
    from train.data.records import Record
    from train.data.token_set import TokenSet
    from train.plan.auto import DatasetStats, Given, ModelStats
    from train.plan.estimate import Load, ModelShape, RankMemory

    Batch = dict[str, Any]
    Loss = tuple[torch.Tensor, list[torch.Tensor]]

DATA = {
    "conversation": ("conversations with the answer to train, without a mark", "supervised"),
    "preference": ("pairs of outputs, one preferred", "dpo"),
    "unpaired": ("conversations with 'label': true for a good answer, false for a bad one", "kto"),
    "prompt": ("conversations that end with the user, with what a grader needs in further fields", "reinforcement"),
}
"""Kinds of data: a description, and a method that takes the kind. All other shapes are of the first kind."""


@dataclass(frozen=True, slots=True)
class Option:
    """A hyperparameter of one method: a number from `low` to `high`, by default `auto`. `help`: text for the CLI."""

    name: str
    low: float
    high: float
    auto: float
    help: str


class Method:
    """A training method, the base class of all methods."""

    name: str  # the value of OpenAI's `method.type` and of TrainSpec.method
    summary: str  # help text for the CLI
    data: str = "conversation"  # kind of data that it trains on, a key of DATA
    options: tuple[Option, ...] = ()
    metric_names: tuple[str, ...] = ()  # names of the values that the loss reports, in order
    # The number of sequences per example; max_length limits each sequence, and one micro-batch has them all.
    sequences: int = 1
    # Whether the run computes and stores the log-probability of every sequence before the first step
    # (train.trainer.train); `Row.reference` then has these values.
    needs_reference: bool = False
    # Whether ranks compute the log-probabilities of all sequences of a step before its first gradient, which takes the
    # time of a forward pass. Every batch then has "divergence": the step's sum of log-probabilities minus reference,
    # times the scale.
    needs_divergence: bool = False
    # "grader" or "teacher" if examples are prompts: in each step the model answers prompts, this judge scores the
    # answers, and the answers become the rows (train.rollouts).
    judged_by: str = ""
    takes: tuple[str, ...] = ()  # fields of a request besides hyperparameters, such as the judge
    by_example: bool = False  # the loss is a mean over examples, not over trained tokens
    rate_share: float = 1.0  # learning rate, as a share of that of supervised tuning
    cut_refuses: bool = False  # whether `check_cut` may raise
    # Whether the loss is minus the sum of all log-probabilities: then the output head computes its gradients in the
    # forward pass, and ranks can share a row's tokens.
    sums: bool = False
    wide: bool = False  # the loss has one term per token, and the head computes in float32

    @property
    def rolls_out(self) -> bool:
        return bool(self.judged_by)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the values that events of steps and validations have besides the loss, the most important value
        first; in events of steps, names may begin with "train_"."""
        return ("mean_token_accuracy", *self.metric_names)

    # -- before the run: in the controller and in commands, without torch or numpy -----------------------------------

    def resolve(
        self, hyperparameters: dict[str, Any], dataset: DatasetStats, model: ModelStats, max_devices: int
    ) -> dict[str, Any]:
        """Return fields of a TrainSpec. Raises InvalidHyperparameter for an unknown name or a value out of range."""
        fields = auto.resolve(hyperparameters, self.rows(dataset), model, max_devices, own=self.own_hyperparameters)
        if fields["sequence_parallel"] > 1 and not self.sums:
            expected = f"1 with the method {self.name!r}, whose loss needs whole sequences"
            raise InvalidHyperparameter("sequence_parallel", fields["sequence_parallel"], expected)
        return fields

    def rows(self, dataset: DatasetStats) -> DatasetStats:
        """Return `dataset` with lengths per sequence, because `max_length` limits each sequence of an example."""
        each = self.sequences
        lengths = tuple(-(-length // each) for length in dataset.lengths)
        return replace(dataset, n_tokens=max(1, dataset.n_tokens // each), lengths=lengths)

    def own_hyperparameters(self, given: Given, fields: dict[str, Any]) -> None:
        """Read `options` into `fields["options"]` (TrainSpec.options, plain JSON values). A subclass may override
        unsuitable common defaults. Raises InvalidHyperparameter."""
        if self.options:
            fields["options"] = {o.name: given.number(o.name, o.low, o.high, auto=o.auto) for o in self.options}
        if not given.is_set("learning_rate"):
            fields["learning_rate"] *= self.rate_share

    def refuses(self, shape: str) -> str | None:
        """Return why this method cannot train on records of this shape (train.data.formats); None if it can."""
        kind = shape if shape in DATA else "conversation"
        if kind == self.data:
            return None
        has, other = DATA[kind]
        wants = f"the method {self.name!r} wants {DATA[self.data][0]}"
        return f"has the shape {shape!r} ({has}), which is for the method {other!r}; {wants}"

    def rank_memory(self, shape: ModelShape, fields: Mapping[str, Any], ranks: int) -> RankMemory:
        """Estimate the memory of each of `ranks` ranks; `fields` as `resolve` returns them."""
        return estimate.rank_memory(shape, {**fields, "max_length": self.sequences * fields["max_length"]}, ranks)

    def load(self, dataset: DatasetStats, fields: Mapping[str, Any]) -> Load:
        """Return the mean content of a run's rows."""
        forwards = self.needs_divergence + self.needs_reference / fields["n_epochs"]
        return auto.load(self.rows(dataset), fields, sequences=self.sequences, forwards=forwards)

    def data_length(self, max_length: int, options: Mapping[str, Any]) -> int:
        """Return the most tokens that a sequence of the data may have; `options`: TrainSpec.options."""
        return max_length

    def policies(self, options: Mapping[str, Any]) -> int:
        """Return how many versions of whole weights shared memory needs for engines to sample from."""
        return 0

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def encode(self, encoder: ChatEncoder, record: Record) -> Sequence[Sequence[Tokens]]:
        """Tokenize a record (train.data.formats.Example); return its rows, each of `sequences` pairs (token ids (n,)
        int32, trained (n,) bool). Raises BadRecord."""
        if "text" in record:
            return [[encoder.encode_text(record["text"])]]
        if "sequences" not in record:
            return [[tokens] for tokens in encoder.encode(record)]
        return [[encoder.encode_whole(chat) for chat in record["sequences"]]]

    def check_cut(self, sequences: Sequence[Tokens], max_length: int) -> None:  # noqa: B027
        """Raise BadRecord if a row has nothing to train on after each sequence is cut to `max_length` tokens. Methods
        without `cut_refuses` drop such rows instead."""

    def denominator(self, tokens: TokenSet, packs: np.ndarray) -> int:
        """Return the divisor of the loss for a step with these packs."""
        return tokens.examples_in(packs) if self.by_example else tokens.labels_in(packs)

    def loss(self, log_probs: torch.Tensor, batch: Batch, options: Mapping[str, Any]) -> Loss:
        """Return the loss summed over a row's examples, a float32 scalar, and the values to add up for each of
        `metric_names`. log_probs: (sequences,) float32, summed over each sequence's trained tokens; if `wide`, (n,) per
        token. batch: from train.methods.packed_objective.to_batch."""
        raise NotImplementedError(f"{self.name} has no loss")
