"""Finds words of a list: profanity and slurs in 27 languages (`listed/`, by Shutterstock, CC BY 4.0, as Google's C4 was
filtered with), and those of the user's own list. A list knows words and not their meaning: a person should look at what
it finds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from train.data_checks.words import words_of

_FOLDER = Path(__file__).with_name("listed")
_MOST_WORDS = 8
# A filter by the last bits of a word's hash: one look rules out most words that begin no entry.
_PLACES = 1 << 16
_MASK = np.uint64(_PLACES - 1)
_DEFAULT = "en"
MOST_LISTED = 100_000


class ListedWords:
    """A list, one word or phrase a line, as hashes of its words. In scripts without spaces a single character is not an
    entry: it is part of too many words."""

    def __init__(self, phrases: Iterable[str]):
        # Entries by first word and length: a place in a text needs one look for each length, however many entries begin
        # alike.
        self._begins: dict[int, dict[int, dict[tuple[int, ...], str]]] = {}
        self._may_begin = np.zeros(_PLACES, bool)
        for phrase in map(str.strip, phrases):
            words = tuple(words_of(phrase).tolist())
            if words and len(words) <= _MOST_WORDS and len(phrase) > 1:
                self._begins.setdefault(words[0], {}).setdefault(len(words), {})[words] = phrase
                self._may_begin[words[0] % _PLACES] = True

    def find(self, words: np.ndarray) -> str | None:
        """An entry that stands in a text of these words; None without."""
        for at in np.flatnonzero(self._may_begin[words & _MASK]):
            for length, entries in self._begins.get(int(words[at]), {}).items():
                if (phrase := entries.get(tuple(words[at : at + length].tolist()))) is not None:
                    return phrase
        return None


class Toxic:
    """The lists that come with the box. A text is compared only with its own language's list: one language's insult is
    another's hour of the day. Raises OSError where they are not installed."""

    def __init__(self) -> None:
        self._lists: dict[str, ListedWords | None] = {_DEFAULT: of_file(_FOLDER / f"{_DEFAULT}.txt")}

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
    """The user's own list: UTF-8, one entry a line. Raises OSError, ValueError."""
    entries = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(entries) > MOST_LISTED:
        raise ValueError(f"{path} has {len(entries)} entries; at most {MOST_LISTED} are taken")
    return ListedWords(entries)
