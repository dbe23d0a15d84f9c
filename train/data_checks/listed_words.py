"""Finds words of a list: profanity and slurs in 27 languages (`listed/`, by Shutterstock, CC BY 4.0, as Google's C4 was
filtered with), and those of a list of one's own. A list knows words and no meaning: what it finds is to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from train.data_checks.words import grams, words_of

_FOLDER = Path(__file__).with_name("listed")
_MOST_WORDS = 8
_DEFAULT = "en"
MOST_LISTED = 100_000


class ListedWords:
    """A list, one word or phrase a line, as hashes of runs of words. In scripts without spaces a single character is no
    entry: it stands in too many words."""

    def __init__(self, phrases: Iterable[str]):
        self._phrases: dict[int, dict[int, str]] = {}
        for phrase in phrases:
            words = words_of(phrase)
            if not 1 <= len(words) <= _MOST_WORDS or len(phrase.strip()) == 1:
                continue
            self._phrases.setdefault(len(words), {})[int(grams(words, len(words))[0])] = phrase.strip()
        self._hashes = {n: np.array(sorted(found), np.uint64) for n, found in self._phrases.items()}

    def find(self, words: np.ndarray) -> str | None:
        """An entry that stands in a text of these words; None without."""
        for n, listed in self._hashes.items():
            if len(words) < n:
                continue
            runs = grams(words, n)
            places = np.minimum(np.searchsorted(listed, runs), len(listed) - 1)
            hits = runs[listed[places] == runs]
            if len(hits):
                return self._phrases[n][int(hits[0])]
        return None


class Toxic:
    """The lists that come with the box. A text is looked at with that of its language alone: one language's insult is
    another's hour of the day."""

    def __init__(self) -> None:
        self._lists: dict[str, ListedWords | None] = {}

    def find(self, words: np.ndarray, language: str | None) -> str | None:
        """language: ISO 639; English where there is none or no list of it."""
        for name in (language or _DEFAULT, _DEFAULT):
            if name not in self._lists:
                self._lists[name] = _of_language(name)
            if (listed := self._lists[name]) is not None:
                return listed.find(words)
        return None


def _of_language(name: str) -> ListedWords | None:
    path = _FOLDER / f"{name}.txt"
    return of_file(path) if name.isalpha() and path.exists() else None


def of_file(path: Path) -> ListedWords:
    """A list of one's own: UTF-8, an entry a line. Raises OSError, ValueError."""
    entries = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(entries) > MOST_LISTED:
        raise ValueError(f"{path} has {len(entries)} entries; at most {MOST_LISTED} are taken")
    return ListedWords(entries)
