"""Decides whether a batch line whose engine died is sent again: counts the engines that died with it. Pure.

An engine takes all its lines down, whichever of them ended it. No line is failed for that: each is sent once more,
later and with no other line on its engine (ports.BatchEngines), so that a second death is its own.
"""

from __future__ import annotations

from collections import Counter

MAX_DEATHS = 2
_LAST_WORDS = (
    "The engine serving this model ended while it had this request, and so did the next one, which had it alone."
)


class Deaths:
    """Counts deaths by line: its custom_id, or the id of a response in background."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()

    def counted(self, line: str) -> bool:
        """One more engine died with it. True if it may be sent again."""
        self._deaths[line] += 1
        return self._deaths[line] < MAX_DEATHS

    def goes_alone(self, line: str) -> bool:
        return line in self._deaths

    def forget(self, line: str) -> None:
        self._deaths.pop(line, None)


def last_words(reason: str) -> str:
    """The message of a line that is not sent again."""
    return f"{_LAST_WORDS} It is not sent to a third ({reason})."


def ended_engines(error: str) -> bool:
    """Whether these are the last words of a line."""
    return error.startswith(_LAST_WORDS)
