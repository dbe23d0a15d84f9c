"""Cuts text into words, and words into n-grams, as hashes, which the checks for likeness and for listed words compare.

A word is a run of letters and digits, in lower case; a character of a script that puts no spaces between words
(Chinese, Japanese, Korean, Thai ...) is a word by itself. Compiled by numba: in Python the words of a gigabyte alone
take minutes. The time is linear in the bytes, whatever they are.
"""

from __future__ import annotations

import numba
import numpy as np

WORD_BASE = np.uint64(0x100000001B3)
_SEED = np.uint64(0xCBF29CE484222325)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_GRAM_BASE = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> np.ndarray:
    """(words,) uint64: the hash of each word, in order."""
    raw = np.frombuffer(text.lower().encode("utf-8", "surrogatepass"), np.uint8)
    return _words(raw)


def grams(words: np.ndarray, n: int) -> np.ndarray:
    """(m,) uint64: the hash of every run of n words; with fewer words than n, one hash of all of them; without words,
    none."""
    return _grams(words, min(n, len(words)))


@numba.njit(cache=True)
def _mix(value: np.uint64) -> np.uint64:
    value ^= value >> np.uint64(33)
    value *= _MIX_1
    value ^= value >> np.uint64(33)
    value *= _MIX_2
    value ^= value >> np.uint64(33)
    return value


@numba.njit(cache=True)
def _stands_alone(point: int) -> bool:
    """Whether a character is a word by itself: its script has no spaces."""
    return (
        0x0E00 <= point < 0x0F00  # Thai, Lao
        or 0x1000 <= point < 0x10A0  # Burmese
        or 0x1780 <= point < 0x1800  # Khmer
        or 0x3040 <= point < 0x3100  # kana
        or 0x3400 <= point < 0xA000  # Han
        or 0xAC00 <= point < 0xD7B0  # hangul
        or 0xF900 <= point < 0xFB00
        or 0xFF66 <= point < 0xFFA0
        or point >= 0x20000
    )


@numba.njit(cache=True)
def _is_punctuation(point: int) -> bool:
    return (
        0x80 <= point < 0xAA
        or 0xAB <= point < 0xB5
        or 0xB6 <= point < 0xBA
        or 0xBB <= point < 0xC0
        or point in (0xD7, 0xF7)
        or 0x2000 <= point < 0x2070
        or 0x20A0 <= point < 0x2100
        or 0x2190 <= point < 0x2C00
        or 0x2E00 <= point < 0x2E80
        or 0x3000 <= point < 0x3040
        or 0xFE10 <= point < 0xFE70
        or 0xFF00 <= point < 0xFF10
        or 0xFF1A <= point < 0xFF21
        or 0xFF3B <= point < 0xFF41
        or 0xFF5B <= point < 0xFF66
        or 0xFFF0 <= point < 0x10000
        or 0x1F000 <= point < 0x20000  # emoji
    )


@numba.njit(cache=True)
def _words(raw: np.ndarray) -> np.ndarray:
    found = np.empty(len(raw), np.uint64)
    count, at, word, inside = 0, 0, _SEED, False
    while at < len(raw):
        first = raw[at]
        if first < 0x80:
            if 0x61 <= first <= 0x7A or 0x30 <= first <= 0x39:
                word = (word ^ np.uint64(first)) * WORD_BASE
                inside = True
            elif inside:
                found[count] = _mix(word)
                count, word, inside = count + 1, _SEED, False
            at += 1
            continue
        width = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        point = np.int64(first) & (0xFF >> (width + 1))
        for following in range(1, width):
            point = (point << 6) | (np.int64(raw[at + following]) & 0x3F) if at + following < len(raw) else point
        at += width
        if _stands_alone(point):
            if inside:
                found[count] = _mix(word)
                count, word, inside = count + 1, _SEED, False
            found[count] = _mix((_SEED ^ np.uint64(point)) * WORD_BASE)
            count += 1
        elif _is_punctuation(point):
            if inside:
                found[count] = _mix(word)
                count, word, inside = count + 1, _SEED, False
        else:
            word = (word ^ np.uint64(point)) * WORD_BASE
            inside = True
    if inside:
        found[count] = _mix(word)
        count += 1
    return found[:count].copy()


@numba.njit(cache=True)
def _grams(words: np.ndarray, n: int) -> np.ndarray:
    if n == 0:
        return np.empty(0, np.uint64)
    # A rolling polynomial over the last n words: the word that leaves the window is subtracted, times the base to the
    # power n.
    leaving = np.uint64(1)
    for _ in range(n):
        leaving *= _GRAM_BASE
    found = np.empty(len(words) - n + 1, np.uint64)
    rolled = np.uint64(0)
    for at in range(len(words)):
        rolled = rolled * _GRAM_BASE + words[at]
        if at >= n:
            rolled -= leaving * words[at - n]
        if at >= n - 1:
            found[at - n + 1] = _mix(rolled)
    return found
