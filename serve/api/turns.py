"""Start-time fair queueing: which of several owners' requests is next. Pure: no clock, its time is tokens served."""

from __future__ import annotations

import zlib

_OWNERS = 1 << 16
ROLLOUTS = ".rollouts"
"""Who asks for the rollouts of a job: no owner of a key, whose names begin with a letter or a digit."""
_BEHIND = 1 << 40
"""Tokens: more than an engine serves in its life."""


def mark_of(owner: str) -> int:
    """Tells owners apart where only a number travels; one in 65,536 pairs has the same."""
    return zlib.crc32(owner.encode()) % _OWNERS


def number(place: int, mark: int) -> int:
    """A request's priority: by its place, and among equal ones by its owner's mark."""
    return place * _OWNERS + mark


def behind(owner: str, place: int) -> int:
    """Where the owner's place is in the whole queue: rollouts stand behind everybody."""
    return place + _BEHIND if owner == ROLLOUTS else place


def place_in(priority: int) -> int:
    return priority // _OWNERS


def owner_in(priority: int) -> int:
    """The mark of the owner whose request has this priority."""
    return priority % _OWNERS


class Turns:
    """Invariant: an owner is in `_ends` only while its requests end later than what is being served."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}

    def enter(self, owner: str, tokens: int) -> int:
        """The place of a request with this many tokens; smaller ones are served first."""
        place = max(self._now, self._ends.get(owner, 0))
        self._ends[owner] = place + tokens
        return place

    def served(self, place: int) -> None:
        """The first request at this place is being served."""
        if place > self._now:
            self._now = place
            self._ends = {owner: end for owner, end in self._ends.items() if end > place}

    def took(self, owner: str, tokens: int) -> None:
        """The owner's requests take this many tokens more than they entered with; below 0 if they were not served."""
        end = max(self._now, self._ends.get(owner, 0)) + tokens
        if end > self._now:
            self._ends[owner] = end
        else:
            self._ends.pop(owner, None)
