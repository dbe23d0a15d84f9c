"""Finds training examples that leak the validation set, by the runs of 13 words (the length that GPT-3 and lm-eval use)
that they share with one of its examples.

Text that many validation examples share is a template and leaks nothing. An example counts as contaminated if it
contains seven tenths of a validation example's runs outside templates, or if seven tenths of its own runs are in one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from train.data_checks.words import grams

GRAM = 13
SHARE = 0.7
_TEMPLATE_SHARE, _TEMPLATE_LEAST = 0.01, 3
# A filter by the last bits of a run's hash: one look rules out most runs that are not known.
_PLACES = 1 << 22
_MASK = np.uint64(_PLACES - 1)


class Overlap(NamedTuple):
    """of: the validation example. share: of the runs of the shorter of the two, 0 to 1."""

    of: int
    share: float


class ValidationIndex:
    """The runs of words of a validation set. Add its examples, then `close`, then query."""

    def __init__(self) -> None:
        self._added: list[np.ndarray] = []
        self._places: dict[bytes, int] = {}
        self._examples: list[int] = []
        self._runs = np.empty(0, np.uint64)
        self._owners = np.empty(0, np.int64)
        self._sizes = np.empty(0, np.int64)
        self._may_be = np.zeros(_PLACES, bool)

    def add(self, example: int, words: np.ndarray) -> None:
        """example: its name in `Overlap.of`. An example with the same text as an earlier one counts as that one."""
        runs = np.unique(grams(words, GRAM))
        if len(runs) and self._places.setdefault(runs.tobytes(), len(self._added)) == len(self._added):
            self._added.append(runs)
            self._examples.append(example)

    def close(self) -> None:
        """Each run belongs to the first example that has it; templates to none."""
        sizes = np.array([len(runs) for runs in self._added], np.int64)
        runs = np.concatenate([*self._added, np.empty(0, np.uint64)])
        owners = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(runs, kind="stable")
        runs, owners = runs[order], owners[order]
        unique, at, times = np.unique(runs, return_index=True, return_counts=True)
        own = times <= max(_TEMPLATE_LEAST, _TEMPLATE_SHARE * len(sizes))
        self._runs, self._owners = unique[own], owners[at[own]]
        self._may_be[self._runs & _MASK] = True
        # An example is as long as its runs that are no template.
        per_run = np.repeat(own, times)
        self._sizes = np.bincount(owners[per_run], minlength=len(sizes)).astype(np.int64)
        self._added, self._places = [], {}

    def overlap(self, words: np.ndarray) -> Overlap | None:
        """The overlap with the validation example that shares most with a text of these words; None if none shares
        enough."""
        runs = grams(words, GRAM)
        likely = np.unique(runs[self._may_be[runs & _MASK]])
        if not len(likely):
            return None
        places = np.minimum(np.searchsorted(self._runs, likely), len(self._runs) - 1)
        shared = self._owners[places[self._runs[places] == likely]]
        if not len(shared):
            return None
        owners, counts = np.unique(shared, return_counts=True)
        most = int(counts.argmax())
        of = int(owners[most])
        share = float(counts[most] / max(1, min(len(np.unique(runs)), self._sizes[of])))
        return Overlap(self._examples[of], min(1.0, share)) if share >= SHARE else None
