"""Counts bytes that the disk holds although their object is gone, because a request still has them open.

A deleted file lies on the disk until its last reader has left, a part of a cancelled upload until its request ends.
The store has no row of them then; without this count an owner's bound would be passed by deleting in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class KeptBytes:
    """Counts bytes by the id of a file or an upload. Invariant: `_gone` names only objects that are open."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._gone: dict[str, str] = {}  # id -> owner

    @contextmanager
    def open(self, object_id: str, size: int = 0) -> Iterator[Callable[[int], None]]:
        """A request has the object open: its `size`, counted once however many have it open, and the bytes that the
        yielded function is called with."""
        if not self._open[object_id]:
            self._bytes[object_id] = size
        self._open[object_id] += 1
        mine = 0

        def more(count: int) -> None:
            nonlocal mine
            mine += count
            self._bytes[object_id] += count

        try:
            yield more
        finally:
            self._open[object_id] -= 1
            self._bytes[object_id] -= mine
            if not self._open[object_id]:
                del self._open[object_id], self._bytes[object_id]
                self._gone.pop(object_id, None)

    def gone(self, object_id: str, owner: str) -> None:
        """The store no longer counts the object: from now on its open bytes count here."""
        if object_id in self._open:
            self._gone[object_id] = owner

    def of(self, owner: str) -> int:
        return sum(self._bytes[object_id] for object_id, whose in self._gone.items() if whose == owner)
