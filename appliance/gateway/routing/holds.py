"""Holds requests while no replica can take them: bounded in number and bytes, in fair order of their owners. Pure.

A request waits in the queue of its model's engines, which adapters and versions on these engines share. The caller owns
the held requests, gives them places and ends them; this file decides which may wait and which is next.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from appliance.gateway.routing.fair_queue import FairQueue

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


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[T]):
    """A request that may be held. host: the model whose engines it waits for; rows: of the table that may take it, in
    its order of preference. tokens: its weight in the queue."""

    item: T
    model: str
    host: str
    rows: tuple[str, ...]
    owner: str
    tokens: int
    body_bytes: int


class Holds(Generic[T]):
    """The queues by host. Invariant: count and body_bytes are sums over all queues; no queue is empty."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.count = 0
        self.body_bytes = 0
        self._queues: dict[str, FairQueue[Ticket[T]]] = {}
        self._rows: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._models: Counter[str] = Counter()

    def add(self, ticket: Ticket[T]) -> Refusal | None:
        """Queue a request, or return why not."""
        if self.count >= self.bounds.requests:
            return Refusal.REQUESTS
        if self._models[ticket.model] >= self.bounds.requests_per_model:
            return Refusal.MODEL_REQUESTS
        if self.body_bytes + ticket.body_bytes > self.bounds.body_bytes:
            return Refusal.BYTES
        self._queues.setdefault(ticket.host, FairQueue()).add(ticket.owner, ticket, ticket.tokens)
        self._count(ticket, 1)
        return None

    def take(self, ticket: Ticket[T]) -> None:
        """Remove a queued request because it got a place."""
        self._queues[ticket.host].take(ticket.owner, ticket)
        self._count(ticket, -1)

    def remove(self, ticket: Ticket[T]) -> bool:
        """Remove a request that waits no longer; False if it is not queued."""
        queue = self._queues.get(ticket.host)
        if queue is None or not queue.discard(ticket.owner, ticket):
            return False
        self._count(ticket, -1)
        return True

    def next(self, host: str, full: Collection[tuple[str, ...]] = ()) -> Ticket[T] | None:
        """The request that is next for a place on these engines; it stays queued. full: rows without a place."""
        if host not in self._queues or len(full) >= len(self._rows[host]):
            return None
        return next((ticket for ticket in self._queues[host] if ticket.rows not in full), None)

    def held(self, model: str) -> int:
        return self._models[model]

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(self._models)

    def hosts(self) -> list[str]:
        """Models whose engines requests wait for."""
        return list(self._queues)

    def __iter__(self) -> Iterator[Ticket[T]]:
        return iter([ticket for queue in self._queues.values() for ticket in queue])

    def _count(self, ticket: Ticket[T], change: int) -> None:
        self.count += change
        self.body_bytes += change * ticket.body_bytes
        self._models[ticket.model] += change
        if not self._models[ticket.model]:
            del self._models[ticket.model]
        rows = self._rows[ticket.host]
        rows[ticket.rows] += change
        if not rows[ticket.rows]:
            del rows[ticket.rows]
        if not self._queues[ticket.host]:
            del self._queues[ticket.host], self._rows[ticket.host]
