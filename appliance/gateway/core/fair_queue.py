"""Orders items of several owners by start-time fair queuing. Pure.

After Goyal, Vin and Cheng, "Start-time Fair Queuing" (SIGCOMM 1996). An owner's next item starts where the owner's last
one ended, in weight that was taken, but never before the item that was taken last. So an owner with one item is next,
however many another owner has, and an owner that was away has saved nothing up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Invariant: no owner's queue is empty; `_starts` has those owners, and those that would start after `_now`."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[T, int]] = {}  # weights by owner and item, the oldest item first
        self._starts: dict[str, int] = {}
        self._now = 0

    def add(self, owner: str, item: T, weight: int) -> None:
        """weight: such as the tokens of a request."""
        if owner not in self._queues:
            self._queues[owner] = {}
            self._starts[owner] = max(self._starts.get(owner, 0), self._now)
        self._queues[owner][item] = weight

    def take(self, owner: str, item: T) -> None:
        """Remove an item because it is served now, which counts for its owner. Raises KeyError."""
        self._now = max(self._now, self._starts[owner])
        self._starts[owner] += self._queues[owner][item]
        self.discard(owner, item)

    def discard(self, owner: str, item: T) -> bool:
        """Remove an item; False if it is not there."""
        if item not in self._queues.get(owner, ()):
            return False
        del self._queues[owner][item]
        if not self._queues[owner]:
            del self._queues[owner]
            self._starts = {one: at for one, at in self._starts.items() if one in self._queues or at > self._now}
        return True

    def __iter__(self) -> Iterator[T]:
        """The owner that starts first with all of its items, the oldest first, then the next owner."""
        for owner in sorted(self._queues, key=self._starts.__getitem__):
            yield from self._queues[owner]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
