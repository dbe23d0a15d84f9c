"""Finds examples that are almost the same: MinHash names candidates, and the exact likeness of their words decides.

The likeness of two texts is the share of their 5-grams of words that both have (Jaccard). The 120 smallest values of a
text's 5-grams under 120 permutations make 20 bands of six; two texts with one band in common are candidates: of those
with a likeness of 0.8 it misses 0.3 %, of 0.9 none in a hundred million. Every candidate is read again and compared
exactly, so none is called a duplicate that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np

GRAM = 5
BANDS, ROWS = 20, 6
LIKE = 0.8
_MOST_CANDIDATES = 4  # of one example: bounds what a file made to collide can cost

_random = np.random.Generator(np.random.PCG64(20))
_FACTORS = _random.integers(0, 2**32, BANDS * ROWS, dtype=np.uint64).astype(np.uint32) | np.uint32(1)
_TERMS = _random.integers(0, 2**32, BANDS * ROWS, dtype=np.uint64).astype(np.uint32)


class Pair(NamedTuple):
    """Example `index` is almost `of`, an earlier one that is not a near duplicate itself."""

    index: int
    of: int
    likeness: float


def bands_of(grams: np.ndarray) -> np.ndarray:
    """(BANDS,) uint32 of a text's grams; all are 0 for a text without words."""
    return _bands(grams, _FACTORS, _TERMS)


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the grams of two texts that both have, 0 to 1."""
    one, other = np.unique(one), np.unique(other)
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)


def near_duplicates(
    bands: np.ndarray, members: np.ndarray, compare: Callable[[int, int], float], least: float = LIKE
) -> list[Pair]:
    """Every example of `members` (ascending indices into `bands`, (n, BANDS) uint32) that is at least this much like an
    earlier one which is not such an example itself."""
    candidates = _candidates(bands, members)
    of: dict[int, int] = {}
    pairs = []
    for place in np.flatnonzero(candidates[:, 0] >= 0):
        index, best = int(members[place]), Pair(0, 0, 0.0)
        for earlier in dict.fromkeys(of.get(int(members[c]), int(members[c])) for c in candidates[place] if c >= 0):
            best = max(best, Pair(index, earlier, compare(earlier, index)), key=lambda pair: pair.likeness)
            if best.likeness >= least:
                break
        if best.likeness >= least:
            of[index] = best.of
            pairs.append(best)
    return pairs


def _candidates(bands: np.ndarray, members: np.ndarray) -> np.ndarray:
    """(members, _MOST_CANDIDATES) int64: places of earlier members with a band in common; -1: no more."""
    found = np.full((len(members), _MOST_CANDIDATES), -1, np.int64)
    filled = np.zeros(len(members), np.int64)
    for band in range(BANDS):
        keys = bands[members, band]
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        begins = np.concatenate([[True], ranked[1:] != ranked[:-1]])
        first = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        previous = np.concatenate([[-1], order[:-1]])
        shared = ~begins & (ranked != 0)  # 0: without words
        for earlier in (first, previous):
            who, whom = order[shared], earlier[shared]
            new = (filled[who] < _MOST_CANDIDATES) & (found[who] != whom[:, None]).all(axis=1)
            found[who[new], filled[who[new]]] = whom[new]
            filled[who[new]] += 1
    return found


@numba.njit(cache=True)
def _bands(grams: np.ndarray, factors: np.ndarray, terms: np.ndarray) -> np.ndarray:
    least = np.full(len(factors), np.uint32(0xFFFFFFFF), np.uint32)
    for at in range(len(grams)):
        gram = np.uint32(grams[at])
        for which in range(len(factors)):
            value = np.uint32(factors[which] * gram + terms[which])
            least[which] = min(least[which], value)
    found = np.zeros(BANDS, np.uint32)
    if len(grams) == 0:
        return found
    for band in range(BANDS):
        mixed = np.uint64(band + 1)
        for row in range(ROWS):
            mixed = (mixed ^ np.uint64(least[band * ROWS + row])) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        found[band] = max(np.uint32(mixed >> np.uint64(32)), np.uint32(1))
    return found
