"""Holds requests while no replica of their model can take them. Pure state: bounded; the owners who wait for a model
take turns, each with its longest waiting request.

The caller passes the time and owns the held requests; this file only decides which may wait, which is next and which
has timed out.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Refusal(enum.Enum):
    """Why a request may not wait."""

    REQUESTS = "too many requests are waiting"
    MODEL_REQUESTS = "too many requests are waiting for this model"
    BYTES = "the waiting requests are too large together"
    DEADLINE = "no replica became ready in time"
    TROUBLE = "its engines do not start"


@dataclass(frozen=True, slots=True)
class Bounds:
    """requests: over all models. body_bytes: sum of the bodies held."""

    requests: int
    requests_per_model: int
    body_bytes: int


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A place in a model's queue; hand it to `Holds.remove` if its owner goes away. owner: of the key that asks."""

    model: str
    item: T
    body_bytes: int
    deadline_s: float
    serial: int
    owner: str


class Holds(Generic[T]):
    """The queues, one for each owner and model. Invariant: count and body_bytes equal the sums over all queues; no
    queue is empty."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.count = 0
        self.body_bytes = 0
        self._serial = 0
        # Holds by owner, the one whose turn it is first; those of an owner by serial.
        self._queues: dict[str, OrderedDict[str, OrderedDict[int, Ticket[T]]]] = {}

    def add(
        self,
        model: str,
        item: T,
        body_bytes: int,
        deadline_s: float,
        now_s: float,
        *,
        owner: str = "",
    ) -> Ticket[T] | Refusal:
        """Queue `item` until `deadline_s`, or return why not."""
        if deadline_s <= now_s:
            return Refusal.DEADLINE
        if self.count >= self.bounds.requests:
            return Refusal.REQUESTS
        if self.held(model) >= self.bounds.requests_per_model:
            return Refusal.MODEL_REQUESTS
        if self.body_bytes + body_bytes > self.bounds.body_bytes:
            return Refusal.BYTES
        self._serial += 1
        ticket = Ticket(model, item, body_bytes, deadline_s, self._serial, owner)
        owners = self._queues.setdefault(model, OrderedDict())
        owners.setdefault(owner, OrderedDict())[ticket.serial] = ticket
        self.count += 1
        self.body_bytes += body_bytes
        return ticket

    def remove(self, ticket: Ticket[T]) -> bool:
        """Remove a ticket; False if it was not (or no longer) queued. If it was its owner's turn, the next one's is."""
        owners = self._queues.get(ticket.model)
        queue = None if owners is None else owners.get(ticket.owner)
        if owners is None or queue is None or ticket.serial not in queue:
            return False
        was_first = next(iter(owners)) == ticket.owner and next(iter(queue)) == ticket.serial
        del queue[ticket.serial]
        self.count -= 1
        self.body_bytes -= ticket.body_bytes
        if not queue:
            del owners[ticket.owner]
        elif was_first:
            owners.move_to_end(ticket.owner)
        if not owners:
            del self._queues[ticket.model]
        return True

    def first(self, model: str) -> Ticket[T] | None:
        """The longest waiting ticket of the owner whose turn it is; it stays queued."""
        owners = self._queues.get(model)
        return next(iter(next(iter(owners.values())).values())) if owners else None

    def turns(self, model: str) -> list[Ticket[T]]:
        """The longest waiting ticket of each owner, in the order of their turns."""
        owners = self._queues.get(model)
        return [] if owners is None else [next(iter(queue.values())) for queue in owners.values()]

    def held(self, model: str) -> int:
        return sum(len(queue) for queue in self._queues.get(model, {}).values())

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(self._queues)

    def __iter__(self) -> Iterator[Ticket[T]]:
        for owners in list(self._queues.values()):
            for queue in list(owners.values()):
                yield from list(queue.values())
