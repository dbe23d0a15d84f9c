"""Bounds the memory that followers of one owner's responses hold: a follower who does not read keeps the response as an
object, and one event of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from appliance.controller.interfaces.errors import ApiError
from runtime.when_gone import when_gone

FOLLOWED_BYTES = 128 << 20
"""An owner's followers together; one alone may follow a larger response."""
TOO_MANY = "too_many_streams"


def followed_bytes(response: str) -> int:
    """What one follower holds: the response as an object, whose texts may have four bytes for a character, and one
    event of it."""
    return 2 * sys.getsizeof(response)


class Held:
    """What one follower holds, from when it was allowed until it has left."""

    def __init__(self, followers: Followers, owner: str, size: int) -> None:
        self._followers, self._owner, self._size = followers, owner, size
        followers.bytes[owner] += size

    def becomes(self, size: int) -> bool:
        """The response has this many bytes now. False if the owner's followers hold too much: this one has to leave."""
        if self._size >= size:
            return True
        self._followers.bytes[self._owner] -= self._size
        fits = self._followers.fits(self._owner, size)
        self._size = size if fits else 0
        self._followers.bytes[self._owner] += self._size
        return fits

    def leave(self) -> None:
        """A second time changes nothing."""
        bytes_of = self._followers.bytes
        bytes_of[self._owner] -= self._size
        self._size = 0
        if not bytes_of[self._owner]:
            del bytes_of[self._owner]


class Followers:
    """bytes: by owner."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def fits(self, owner: str, size: int) -> bool:
        held = self.bytes[owner]
        return not held or held + size <= FOLLOWED_BYTES

    def check(self, owner: str, size: int) -> None:
        """Raises ApiError 429 if another one of this size would be too much."""
        if not self.fits(owner, size):
            raise ApiError(429, self.why(owner), code=TOO_MANY)

    def why(self, owner: str) -> str:
        return (
            f"Streams of your responses in background hold {self.bytes[owner]} bytes; {FOLLOWED_BYTES} are allowed. "
            "End some of them first, or retrieve the response without stream=true."
        )

    def enter(
        self, owner: str, size: int, events: Callable[[Held], AsyncGenerator[bytes, None]]
    ) -> AsyncGenerator[bytes, None]:
        """The events of one more follower, who is counted from now on. Raises ApiError 429.

        (When followers were counted only from their first event on, any number that came together passed the bound.)"""
        self.check(owner, size)
        held = Held(self, owner, size)
        found = events(held)
        when_gone(found, held.leave)  # a generator that is never asked for an event does not end by itself
        return found
