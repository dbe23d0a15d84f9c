"""Finds texts that repeat others: near duplicates by MinHash, and training examples that contain a validation example.

Texts are compared by their runs of words (n-grams) as hashes. A word is a run of letters and digits in lower case; in
scripts without spaces between words (Chinese, Japanese, Korean, Thai) every character is a word.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter

import numpy as np

LIKE = 0.8
"""Near duplicates share at least this part of their 5-grams of words (Jaccard)."""
OVERLAP = 0.7
"""A training example is contaminated if it and a validation example share this part of the 13-grams of the shorter."""
_GRAM, _OVERLAP_GRAM = 5, 13  # 13: the length that GPT-3 and lm-eval use
_BANDS, _ROWS = 16, 5  # texts with a likeness of 0.8 share no band in 0.2 % of all cases
# Runs in more validation examples than this share (at least _TEMPLATE_LEAST) are a template, which leaks nothing.
_TEMPLATE_SHARE, _TEMPLATE_LEAST = 0.01, 3
_CHUNK = 1 << 14  # n-grams hashed together: bounds the memory that a long text takes

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
_random = np.random.default_rng(20)
_FACTORS = _random.integers(0, 2**32, (_BANDS * _ROWS, 1), np.uint32) | np.uint32(1)
_TERMS = _random.integers(0, 2**32, (_BANDS * _ROWS, 1), np.uint32)
_BAND_FACTORS = _random.integers(0, 2**64, (_BANDS, _ROWS), np.uint64) | np.uint64(1)
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)


def words_of(text: str) -> np.ndarray:
    """(words,) uint64: the hash of each word, in order."""
    return np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], np.uint64)


def grams(words: np.ndarray, n: int) -> np.ndarray:
    """(m,) uint64, ascending: the distinct hashes of all runs of n words; of fewer words than n, one of them all."""
    if not len(words):
        return words
    n = min(n, len(words))
    rolled = np.zeros(len(words) - n + 1, np.uint64)
    for place in range(n):
        rolled = rolled * _BASE + words[place : place + len(rolled)]
    rolled = (rolled ^ (rolled >> np.uint64(33))) * _MIX
    return np.unique(rolled ^ (rolled >> np.uint64(33)))


class NearDuplicates:
    """Texts in the order of their file, each compared with the earlier ones that share a band of their MinHash."""

    def __init__(self) -> None:
        self._by_band: dict[int, int] = {}
        self._grams: dict[int, np.ndarray] = {}

    def find(self, index: int, words: np.ndarray) -> tuple[int, float] | None:
        """The index of an earlier text that this one nearly repeats, and their likeness; None without any, and then
        later texts are compared with this one too."""
        if not len(words):
            return None
        own = grams(words, _GRAM).astype(np.uint32)  # half the time and memory; in one text, these rarely meet
        keys = _bands(own)
        for earlier in dict.fromkeys(self._by_band[key] for key in keys if key in self._by_band):
            if (alike := _likeness(own, self._grams[earlier])) >= LIKE:
                return earlier, alike
        self._by_band.update(dict.fromkeys(keys, index))
        self._grams[index] = own
        return None


def _bands(own: np.ndarray) -> list[int]:
    """A hash of each band of the text's MinHash signature."""
    least = np.full((_BANDS * _ROWS, 1), 2**32 - 1, np.uint32)
    for at in range(0, len(own), _CHUNK):
        hashed = own[at : at + _CHUNK] * _FACTORS + _TERMS
        least = np.minimum(least, hashed.min(axis=1, keepdims=True))
    return list((least.reshape(_BANDS, _ROWS) * _BAND_FACTORS).sum(axis=1, dtype=np.uint64).tolist())


def _likeness(one: np.ndarray, other: np.ndarray) -> float:
    """The Jaccard index; 0 without comparing if the sizes rule out LIKE."""
    if min(len(one), len(other)) < LIKE * max(len(one), len(other)):
        return 0.0
    both = len(np.intersect1d(one, other))
    return both / (len(one) + len(other) - both)


class ValidationIndex:
    """The 13-grams of a validation set, each with the first example that has it."""

    def __init__(self, texts: dict[int, str]):
        """texts: by the number of their line."""
        each = {line: grams(words_of(text), _OVERLAP_GRAM).tolist() for line, text in texts.items()}
        times = Counter(gram for own in each.values() for gram in own)
        most = max(_TEMPLATE_LEAST, _TEMPLATE_SHARE * len(each))
        self._line: dict[int, int] = {}
        self._size: Counter[int] = Counter()
        for line, own in each.items():
            for gram in own:
                if times[gram] <= most:
                    self._line.setdefault(gram, line)
                    self._size[line] += 1

    def overlap(self, words: np.ndarray) -> tuple[int, float] | None:
        """The line of the validation example that shares most, and the share; None if it is less than OVERLAP."""
        own = grams(words, _OVERLAP_GRAM)
        shared = Counter(self._line[gram] for gram in own.tolist() if gram in self._line)
        if not shared:
            return None
        line, count = shared.most_common(1)[0]
        share = min(1.0, count / min(len(own), self._size[line]))
        return (line, share) if share >= OVERLAP else None
