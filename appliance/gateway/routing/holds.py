"""Holds requests while no replica can take them: bounded in number, in fair order of their owners. Pure.

A request waits in the queue of its model's engines, which adapters and versions on these engines share. This file
decides which may wait and which is next; whoever waits awaits its ticket's future.
"""

from __future__ import annotations

from asyncio import Future
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from appliance.gateway.routing.fair_queue import FairQueue
from appliance.gateway.routing.router import Choice, Work


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request that waits. host: the model whose engines it waits for; names: of models in the table that may take
    it, in its order of preference. avoided: replicas that take it only if no other can. place: its replica, or why it
    gets none.
    """

    model: str
    host: str
    names: tuple[str, ...]
    work: Work
    avoided: Collection[str]
    place: Future[Choice]


class Holds:
    """The queues by host; no queue is empty. most: requests that may wait."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._queues: dict[str, FairQueue[Ticket]] = {}
        self._models: Counter[str] = Counter()
        self._names: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)

    def add(self, ticket: Ticket) -> bool:
        """Queue a request; False if too many wait already."""
        if self.count >= self.most:
            return False
        self._queues.setdefault(ticket.host, FairQueue()).add(ticket.work.owner, ticket, ticket.work.tokens)
        self._count(ticket, 1)
        return True

    def take(self, ticket: Ticket, choice: Choice) -> None:
        """Give a queued request its place."""
        self._queues[ticket.host].take(ticket.work.owner, ticket)
        self._count(ticket, -1)
        ticket.place.set_result(choice)

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """End the wait of a queued request."""
        if self.remove(ticket):
            ticket.place.set_exception(error)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a request that waits no longer; False if it is not queued."""
        queue = self._queues.get(ticket.host)
        if queue is None or not queue.discard(ticket.work.owner, ticket):
            return False
        self._count(ticket, -1)
        return True

    def next(self, host: str, full: Collection[tuple[str, ...]] = ()) -> Ticket | None:
        """The request that is next for a place on these engines; it stays queued. full: names without a place."""
        if len(full) >= len(self._names[host]):
            return None  # without a look at each, of which there may be thousands
        return next((ticket for ticket in self._queues.get(host, ()) if ticket.names not in full), None)

    def held(self, model: str) -> int:
        return self._models[model]

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(self._models)

    def hosts(self) -> list[str]:
        """Models whose engines requests wait for."""
        return list(self._queues)

    def _count(self, ticket: Ticket, change: int) -> None:
        self.count += change
        self._models[ticket.model] += change
        self._names[ticket.host][ticket.names] += change
        if not self._models[ticket.model]:
            del self._models[ticket.model]
        if not self._names[ticket.host][ticket.names]:
            del self._names[ticket.host][ticket.names]
        if not self._queues[ticket.host]:
            del self._queues[ticket.host]
