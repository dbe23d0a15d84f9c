"""Says which of several owners is next: among requests by start-time fair queueing, where time is tokens served (no
clock is read); among work for threads in turns."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

_OWNERS = 1 << 16
ROLLOUTS = ".rollouts"
"""The owner of a job's rollouts: no key has it, because owners' names begin with a letter or a digit."""
_BEHIND = 1 << 40
"""Tokens: more than an engine serves in its life."""


def mark_of(owner: str) -> int:
    """Tells owners apart where only a number travels; one in 65,536 pairs has the same."""
    return zlib.crc32(owner.encode()) % _OWNERS


def number(place: int, mark: int) -> int:
    """A request's priority: by its place, and among equal ones by its owner's mark."""
    return place * _OWNERS + mark


def behind(owner: str, place: int) -> int:
    """The owner's part of the queue: rollouts wait behind everybody."""
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
        """The owner's requests take this many more tokens than they entered with; below 0 if they were not served."""
        end = max(self._now, self._ends.get(owner, 0)) + tokens
        if end > self._now:
            self._ends[owner] = end
        else:
            self._ends.pop(owner, None)


class Room:
    """Places for what one owner has at work, given in the order in which they were asked for."""

    def __init__(self, places: int) -> None:
        self._turn, self._places, self._most = asyncio.Lock(), asyncio.Semaphore(places), places

    def take(self, number: int) -> Taken:
        return Taken(self, min(number, self._most))


class Rooms:
    """A room of so many places for each owner."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._of: weakref.WeakValueDictionary[str, Room] = weakref.WeakValueDictionary()

    def of(self, owner: str) -> Room:
        return self._of.setdefault(owner, Room(self._places))


class Taken:
    """Places of a room, for as long as a block takes. (No generator: it is used in generators that are closed without
    being read to their end, and such a one would be closed before they are.)"""

    def __init__(self, room: Room, number: int) -> None:
        self._room, self._number, self._taken = room, number, 0

    async def __aenter__(self) -> None:
        await self.take()

    async def take(self) -> None:
        try:
            async with self._room._turn:
                while self._taken < self._number:
                    await self._room._places.acquire()
                    self._taken += 1
        except BaseException:
            self.give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """At once. More often than taken, too: the rest of the block then has none."""
        for _ in range(self._taken):
            self._room._places.release()
        self._taken = 0


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Work:
    do: Callable[[], Any]
    is_left: Callable[[], bool]
    done: Future[Any] = field(default_factory=Future)


class ThreadsInTurns:
    """begin: `submit` of a pool with so many threads; an owner has at most `most` of them at once."""

    def __init__(self, begin: Callable[[Callable[[], Any]], Future[Any]], threads: int, most: int) -> None:
        self._begin_work, self._threads, self._most = begin, threads, most
        self._lock = threading.RLock()  # what is done at once ends within `_begin`
        self._waiting: dict[Hashable, deque[_Work]] = {}  # by owner
        self._at_work = Counter[Hashable]()
        self._served: dict[Hashable, int] = {}  # of owners who are at work or wait: the number of their last turn
        self._turn = 0

    def submit(self, owner: Hashable, do: Callable[[], Any], is_left: Callable[[], bool] = _never) -> Future[Any]:
        """is_left: whether nobody waits for it any more; it is then cancelled when its turn comes."""
        work = _Work(do, is_left)
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(work)
            self._begin()
        return work.done

    def take_over(self, other: ThreadsInTurns) -> None:
        """Makes the work that waits for the other's threads wait for these."""
        with other._lock:
            waiting, other._waiting = other._waiting, {}
        with self._lock:
            for owner, theirs in waiting.items():
                self._waiting.setdefault(owner, deque()).extend(theirs)
            self._begin()

    def cancel(self) -> None:
        """Drops what waits."""
        with self._lock:
            for theirs in self._waiting.values():
                for work in theirs:
                    work.done.cancel()
            self._waiting.clear()

    def _begin(self) -> None:
        """With the lock: free threads go to the owner with the fewest of them, and then to the one whose last turn was
        longest ago."""
        while self._at_work.total() < self._threads:
            may = [owner for owner in self._waiting if self._at_work[owner] < self._most]
            if not may:
                return
            owner = min(may, key=lambda one: (self._at_work[one], self._served.get(one, -1)))
            work = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if work.is_left():
                work.done.cancel()
            if not work.done.set_running_or_notify_cancel():
                continue
            self._turn += 1
            self._served[owner] = self._turn
            self._at_work[owner] += 1
            self._begin_work(work.do).add_done_callback(functools.partial(self._ended, owner, work.done))

    def _ended(self, owner: Hashable, done: Future[Any], worked: Future[Any]) -> None:
        if worked.cancelled():  # the pool ends
            done.set_exception(CancelledError())
        elif error := worked.exception():
            done.set_exception(error)
        else:
            done.set_result(worked.result())
        with self._lock:
            self._at_work[owner] -= 1
            if not self._at_work[owner]:
                del self._at_work[owner]
                if owner not in self._waiting:
                    self._served.pop(owner, None)
            self._begin()
