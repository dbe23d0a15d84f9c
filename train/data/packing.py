"""Packs examples into rows and orders the rows, which determines the tokens of each step. Pure numpy.

Rules
- Packing depends on the lengths alone, the order on (seed, epoch) alone; a step depends on its number alone. Nothing
  depends on the world size, so a run may change it between steps.
- A row holds whole examples only. Their sequences (one each, or as many as the training method says) never see each
  other (`Row.segments`; positions restart), so packing changes the speed and not the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from train.plan.auto import ROW_MULTIPLE, best_fit


def plan_packs(lengths: np.ndarray, capacity: int, *, packing: bool = True) -> list[np.ndarray]:
    """Groups of example indices whose lengths sum to at most `capacity` tokens; every example in exactly one.

    Best fit decreasing, O(n log n): lengths (n,) int, each at most `capacity`. Without packing: one by one.
    """
    if not packing:
        return [np.array([index]) for index in range(len(lengths))]
    decreasing = ((int(index), int(lengths[index])) for index in np.argsort(-lengths, kind="stable"))
    return [np.array(pack) for pack in best_fit(decreasing, capacity)]


@dataclass(frozen=True)
class StepPlan:
    """The endless stream of packs, shuffled for each epoch, cut into steps of `batch_size`. Only what
    belongs to `n_epochs` counts in the last step: an epoch is each pack once."""

    n_packs: int
    batch_size: int
    micro_batch: int
    n_epochs: int
    seed: int

    @property
    def total_steps(self) -> int:
        return -(-self.n_packs * self.n_epochs // self.batch_size)

    def epoch_end_steps(self) -> list[int]:
        """Numbers of steps done when each epoch is through; the last is `total_steps`."""
        return [-(-self.n_packs * epoch // self.batch_size) for epoch in range(1, self.n_epochs + 1)]

    def validates(self, step: int, every: int) -> bool:
        """Whether a validation follows when `step` steps are done: every `every` steps, for 0 after each epoch; after
        the last in any case."""
        return step == self.total_steps or (step % every == 0 if every else step in self.epoch_end_steps())

    def packs_of_step(self, step: int) -> np.ndarray:
        """Pack indices (batch_size,) of optimizer step `step` (0-based)."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = positions // self.n_packs
        orders = {int(epoch): _shuffled(self.n_packs, self.seed, int(epoch)) for epoch in np.unique(epochs)}
        return np.array([orders[int(e)][p % self.n_packs] for e, p in zip(epochs, positions, strict=True)])

    def counted(self, step: int) -> int:
        """How many of the first packs of this step are learnt from; those behind them fill it up."""
        return min(self.batch_size, self.n_packs * self.n_epochs - step * self.batch_size)

    def learnt_in_step(self, step: int) -> np.ndarray:
        """The packs of this step that count."""
        return self.packs_of_step(step)[: self.counted(step)]

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[tuple[int, np.ndarray]]:
        """(number within the step, pack indices) of the micro-batches that `rank` computes in `step`."""
        packs = self.packs_of_step(step).reshape(-1, self.micro_batch)
        return [(number, packs[number]) for number in range(rank, len(packs), world_size)]


@lru_cache(maxsize=4)
def _shuffled(n_packs: int, seed: int, epoch: int) -> np.ndarray:
    """The packs of an epoch in their order; of a million it takes 40 ms, several times in each step."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(n_packs)


@dataclass(frozen=True)
class Row:
    """One micro-batch as a single row of tokens.

    input_ids, position_ids: (tokens,) int64. predict_at, labels: (n,) int64, the positions whose next token is
    learnt and that token. segments: (start, end) of each sequence; the rest of a pack is padding, a separate segment
    without labels. sequence_sizes: the number of labels of each sequence, one after the other in `labels`. reference:
    (sequences,) float32, what the starting model says of each (train.trainer.train); None where it is not known.
    weight: 1, or 0 where the row only fills a step, so that every rank computes equally many. marks: of each sequence,
    the loss mask of its first token: no loss reads it, so that it may carry a label of the example (KTO).

    Of answers that the model itself has sampled: advantages: (n,) float32, how much better than expected each label is.
    sampled: (n,) float32, its log-probability when it was sampled. allowed: a function that returns (n, words) int32, a
    bit for each token of the vocabulary that could have been sampled in its place; None if all could. It is called for
    the row that is learnt from, and its result is not kept: 20 KB for each token.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    predict_at: np.ndarray
    labels: np.ndarray
    segments: tuple[tuple[int, int], ...]
    sequence_sizes: tuple[int, ...]
    n_tokens: int  # without padding
    reference: np.ndarray | None = None
    weight: float = 1.0
    marks: tuple[bool, ...] = ()
    advantages: np.ndarray | None = None
    sampled: np.ndarray | None = None
    allowed: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class StepData:
    """What a rank learns from in one step.

    rows: (number within the step, row) of its micro-batches. denominator: what the loss is divided by. tokens: of the
    whole step, with those that are not learnt. figures: further data of the step's event. waited: seconds until it was
    there, by part. All but `rows` are the same on every rank.
    """

    rows: list[tuple[int, Row]]
    denominator: int
    tokens: int
    figures: dict[str, Any] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)


def part_of(row: Row, index: int, parts: int) -> Row:
    """The row's tokens [index, index + 1) / parts with what is learnt there. `segments` stay those of the whole row:
    attention sees all of it (Ulysses)."""
    each = len(row.input_ids) // parts
    first = index * each
    inside = (first <= row.predict_at) & (row.predict_at < first + each)
    ends = np.cumsum([0, *row.sequence_sizes])
    return replace(
        row,
        input_ids=row.input_ids[first : first + each],
        position_ids=row.position_ids[first : first + each],
        predict_at=row.predict_at[inside] - first,
        labels=row.labels[inside],
        sequence_sizes=tuple(int(inside[start:end].sum()) for start, end in pairwise(ends)),
    )


def build_row(packs: list[list[tuple[np.ndarray, np.ndarray]]], capacity: int, pad_id: int, *, packing: bool) -> Row:
    """Lay out packs of (token ids, loss mask) sequences one after the other, each pack padded to its capacity.

    `capacity` is in tokens per pack; without packing a pack is padded to a multiple of ROW_MULTIPLE only.
    The first token of a sequence is never predicted, because nothing precedes it.
    """
    ids, positions, learn, segments, sizes, marks, n_tokens = [], [], [], [], [], [], 0
    offset = 0
    for pack in packs:
        used = 0
        for tokens, mask in pack:
            size = len(tokens)
            ids.append(tokens)
            positions.append(np.arange(size))
            learn.append(np.append(mask[1:], False))
            segments.append((offset + used, offset + used + size))
            sizes.append(int(mask[1:].sum()))
            marks.append(bool(mask[0]))
            used += size
        n_tokens += used
        width = capacity if packing else -(-used // ROW_MULTIPLE) * ROW_MULTIPLE
        if width > used:
            ids.append(np.full(width - used, pad_id))
            positions.append(np.arange(width - used))
            learn.append(np.zeros(width - used, bool))
            segments.append((offset + used, offset + width))
        offset += width
    input_ids = np.concatenate(ids).astype(np.int64)
    predict_at = np.flatnonzero(np.concatenate(learn))
    position_ids = np.concatenate(positions).astype(np.int64)
    labels = input_ids[predict_at + 1]
    return Row(input_ids, position_ids, predict_at, labels, tuple(segments), tuple(sizes), n_tokens, marks=tuple(marks))
