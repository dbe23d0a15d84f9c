"""Packs examples into rows and orders the rows, which determines the tokens of each step. Pure numpy.

Rules
- Packs depend only on lengths, the order of packs only on (seed, epoch), a step only on its number. Nothing depends on
  the world size, so a run may change the world size between steps.
- A row holds whole examples only. Attention stays within a sequence (`Row.segments`), and positions restart with each
  sequence, so packing changes speed but not the loss.
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
    """Group example indices so that lengths sum to at most `capacity` tokens, by best fit decreasing in O(n log n).
    lengths: (n,) int, each at most `capacity`. Without packing each example is a group."""
    if not packing:
        return [np.array([index]) for index in range(len(lengths))]
    decreasing = ((int(index), int(lengths[index])) for index in np.argsort(-lengths, kind="stable"))
    return [np.array(pack) for pack in best_fit(decreasing, capacity)]


@dataclass(frozen=True)
class StepPlan:
    """Assigns packs to steps of `batch_size`, shuffled for each epoch, which has every pack once. Packs of a further
    epoch fill up the last step; their loss does not count."""

    n_packs: int
    batch_size: int
    micro_batch: int
    n_epochs: int
    seed: int

    @property
    def total_steps(self) -> int:
        return -(-self.n_packs * self.n_epochs // self.batch_size)

    def epoch_end_steps(self) -> list[int]:
        """Return the number of steps up to the end of each epoch; the last number is `total_steps`."""
        return [-(-self.n_packs * epoch // self.batch_size) for epoch in range(1, self.n_epochs + 1)]

    def validates(self, step: int, every: int) -> bool:
        """Whether a validation follows `step` steps: after every `every` steps (after each epoch if `every` is 0), and
        after the last step."""
        return step == self.total_steps or (step % every == 0 if every else step in self.epoch_end_steps())

    def packs_of_step(self, step: int) -> np.ndarray:
        """Pack indices (batch_size,) of optimizer step `step` (0-based)."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = positions // self.n_packs
        orders = {int(epoch): _shuffled(self.n_packs, self.seed, int(epoch)) for epoch in np.unique(epochs)}
        return np.array([orders[int(e)][p % self.n_packs] for e, p in zip(epochs, positions, strict=True)])

    def counted(self, step: int) -> int:
        """Return how many packs of this step count towards the loss; later packs only fill up the step."""
        return min(self.batch_size, self.n_packs * self.n_epochs - step * self.batch_size)

    def learnt_in_step(self, step: int) -> np.ndarray:
        """Return the packs of this step that count towards the loss."""
        return self.packs_of_step(step)[: self.counted(step)]

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[tuple[int, np.ndarray]]:
        """Return (number within the step, pack indices) of each micro-batch of `rank`."""
        packs = self.packs_of_step(step).reshape(-1, self.micro_batch)
        return [(number, packs[number]) for number in range(rank, len(packs), world_size)]


@lru_cache(maxsize=4)
def _shuffled(n_packs: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffle the packs of an epoch. Cached: a million packs take 40 ms, several times in each step."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(n_packs)


@dataclass(frozen=True)
class Row:
    """One micro-batch as a single row of tokens.

    input_ids, position_ids: (tokens,) int64. predict_at, labels: (n,) int64, the positions whose next token is trained,
    and these next tokens. segments: (start, end) of each sequence; the padding of a pack is a segment without labels.
    sequence_sizes: the number of labels of each sequence, in the order of `labels`. reference: (sequences,) float32,
    log-probabilities in the starting model; None where they are unknown. weight: 1, or 0 for a row that only fills up a
    step, so that all ranks compute equally many rows. marks: the loss mask of each sequence's first token. No loss uses
    that token, so its mask may encode the example's label (KTO).

    For answers that the model sampled: advantages: (n,) float32, how much better than expected each label is. sampled:
    (n,) float32, each label's log-probability when it was sampled. allowed: returns (n, words) int32, a bit per
    vocabulary token, set if that token could have been sampled in place of the label; None: all tokens. Computed per
    row and not stored: a label takes 20 KB.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    predict_at: np.ndarray
    labels: np.ndarray
    segments: tuple[tuple[int, int], ...]
    sequence_sizes: tuple[int, ...]
    n_tokens: int  # number of tokens without padding
    reference: np.ndarray | None = None
    weight: float = 1.0
    marks: tuple[bool, ...] = ()
    advantages: np.ndarray | None = None
    sampled: np.ndarray | None = None
    allowed: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class StepData:
    """A rank's data for one step.

    rows: (number within the step, row) of the rank's micro-batches. denominator: divisor of the loss. tokens: number of
    all tokens in the step, trained or not. figures: further fields of the step's event. waited: seconds spent waiting,
    by cause. All fields but `rows` are the same on every rank.
    """

    rows: list[tuple[int, Row]]
    denominator: int
    tokens: int
    figures: dict[str, Any] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)


def part_of(row: Row, index: int, parts: int) -> Row:
    """Return part `index` of the row's tokens, with the labels in that part. `segments` stay the whole row's, because
    attention runs over the whole row (Ulysses)."""
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
    """Join packs of (token ids, loss mask) sequences into one row. The first token of a sequence is never predicted,
    because nothing precedes it. capacity: length in tokens to which each pack is padded; without packing, packs are
    padded to a multiple of ROW_MULTIPLE."""
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
