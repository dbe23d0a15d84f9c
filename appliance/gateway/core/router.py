"""Chooses the replica that answers a request, and queues requests that no replica can take. Pure state, without sockets
or a clock; a queued request awaits the future in its ticket.

A replica's load estimates how long a new request waits for its first token: prompt tokens still to be computed, plus a
small weight for all other tokens, which slow each step down. Requests with the same prefix prefer the same replica (its
prefix cache is warm), unless its load clearly exceeds the lowest load. Rendezvous hashing (Thaler and Ravishankar 1998)
picks the preferred replica, so that a new replica takes over only its share; the load bound follows "Consistent Hashing
with Bounded Loads" (Mirrokni et al. 2016)."""

from __future__ import annotations

import zlib
from asyncio import Future
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import count
from typing import Final

from appliance.gateway.core.table import OPEN, Model, Replica

# A prompt token that is still to be computed weighs as much as this many other tokens.
PENDING_TO_TOTAL: Final = 16
# The preferred replica's load may be this factor times the lowest load plus this many tokens, because at low load a
# cache hit is worth more than balance.
AFFINITY_FACTOR = 1.25
AFFINITY_SLACK_TOKENS = 4096
PAUSE_FIRST_S = 0.25
PAUSE_MAX_S = 4.0
# Added to the priority of class batch, which so comes last: more milliseconds than any machine's uptime.
BATCH_BEHIND: Final = 1 << 50


@dataclass
class Work:
    """Work of one request for a replica. tokens: estimated tokens of prompt and completion. sequences: engine slots
    that the request takes, 0 for a request that only counts tokens. beginning: hash of the system prompt and first
    question, independent of JSON spelling. batch: whether the request is of class batch."""

    owner: str = ""
    tokens: int = 1
    prompt_tokens: int = 0
    sequences: int = 1
    beginning: int = 0
    batch: bool = False


@dataclass(slots=True)
class ReplicaLoad:
    """Outstanding work on one replica. pending: prompt tokens of streams that wait for their first token, and of other
    requests that wait for their answer. batch_sequences: sequences of class batch. owners: tokens by owner. failures:
    consecutive failures. paused_until_s: the replica gets no requests before this time."""

    inflight: int = 0
    tokens: int = 0
    pending: int = 0
    sequences: int = 0
    batch_sequences: int = 0
    failures: int = 0
    paused_until_s: float = 0.0
    owners: Counter[str] = field(default_factory=Counter)

    @property
    def weight(self) -> int:
        return self.pending + self.tokens // PENDING_TO_TOTAL

    def add(self, work: Work, sign: int = 1) -> None:
        """Add a request's work, or subtract it (sign -1) when the request ends."""
        self.inflight += sign
        self.tokens += sign * work.tokens
        self.sequences += sign * work.sequences
        self.batch_sequences += sign * work.sequences * work.batch
        self.owners[work.owner] += sign * work.tokens
        if not self.owners[work.owner]:
            del self.owners[work.owner]


@dataclass(slots=True, eq=False)
class Choice:
    """A request placed on a replica; pass it to `Router.end` exactly once. model: the model's name, or the canary's if
    the canary took the request. priority: sort key of the engine's queue, smallest first: the arrival time plus a
    millisecond for each token that the owner has on the replica. So an owner with many requests does not block others
    when the engine's memory is full. pending: the request's prompt tokens, 0 after its first token."""

    model: str
    replica: Replica
    work: Work
    load: ReplicaLoad
    priority: int
    pending: int


class Router:
    """Routing table plus outstanding work. A replica may serve several models (adapters on one base), so load is
    counted by replica id. The load of a replica that left the table is kept until its last request ends, because the
    controller waits for zero. max_inflight: limit of sequences on a replica whose number of slots is unknown."""

    def __init__(self, *, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        self.models: dict[str, Model] = {}
        self.loads: dict[str, ReplicaLoad] = {}
        self._open: set[str] = set()

    def apply(self, models: Iterable[Model]) -> None:
        """Replace the table."""
        self.models = {model.name: model for model in models}
        replicas = [replica for model in self.models.values() for replica in model.replicas]
        self._open = {replica.id for replica in replicas if replica.state == OPEN}
        kept = {name: load for name, load in self.loads.items() if load.inflight}
        self.loads = kept | {replica.id: self.loads.get(replica.id) or ReplicaLoad() for replica in replicas}

    def choose(self, names: Sequence[str], work: Work, now_s: float, avoid: Collection[str] = ()) -> Choice | None:
        """Place a request on a replica of the first model in `names` with free capacity; None if all are full.

        avoid: replicas to use only if no other replica can take the request."""
        for model in (self.models[name] for name in names if name in self.models):
            usable = [
                (replica, load)
                for replica in model.replicas
                if replica.state == OPEN
                and (load := self.loads[replica.id]).paused_until_s <= now_s
                and self._has_room(model, load, work)
            ]
            if not usable:
                continue
            usable = [pair for pair in usable if not pair[0].avoid and pair[0].id not in avoid] or usable
            replica, load = usable[0]
            if len(usable) > 1:
                least = min(load.weight for _, load in usable)
                replica, load = max(usable, key=lambda pair: _score(pair[0].id, work.beginning))
                if load.weight > least * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS:
                    replica, load = min(usable, key=lambda pair: pair[1].weight)
            priority = int(now_s * 1000) + load.owners[work.owner] + BATCH_BEHIND * work.batch
            load.add(work)
            load.pending += work.prompt_tokens
            return Choice(model.name, replica, work, load, priority, work.prompt_tokens)
        return None

    def _has_room(self, model: Model, load: ReplicaLoad, work: Work) -> bool:
        """Whether a replica may take more work. 1.25 x its slots keep an engine busy; further requests wait here, in
        fair order of owners. Class batch gets at most half of the slots, and nothing while all are in use."""
        slots = model.slots or self.max_inflight
        if work.batch and work.sequences:
            return load.sequences < slots and load.batch_sequences < max(1, slots // 2)
        return not work.sequences or load.sequences < (slots if model.slots is None else slots + slots // 4)

    def canary_for(self, model: Model, caller: str, conversation: int) -> tuple[str, ...]:
        """Return the name of the model's canary if the canary gets this conversation.

        The choice hashes caller and conversation, so that a conversation stays on one version."""
        canary = model.canary
        if canary is None or canary.name not in self.models:
            return ()
        return (canary.name,) if _score(f"{model.name} {caller}", conversation) < canary.share * 2**32 else ()

    def started(self, choice: Choice) -> None:
        """Record the first token, after which the prompt no longer delays other requests."""
        choice.load.pending -= choice.pending
        choice.pending = 0

    def end(self, choice: Choice) -> bool:
        """Remove a request from its replica. Returns True if a draining replica has just become idle."""
        choice.load.add(choice.work, -1)
        self.started(choice)
        return not choice.load.inflight and not self.is_open(choice)

    def is_open(self, choice: Choice) -> bool:
        """Whether the request's replica still takes requests."""
        return choice.replica.id in self._open

    def fail(self, choice: Choice, now_s: float) -> None:
        """Pause a replica that did not answer, longer after each failure in a row."""
        load = choice.load
        load.paused_until_s = now_s + min(PAUSE_FIRST_S * 2**load.failures, PAUSE_MAX_S)
        load.failures = min(load.failures + 1, 16)


@dataclass(slots=True, eq=False)
class Ticket:
    """A waiting request. queue: model whose engines the request needs, and whether its class is batch. names, avoided:
    arguments for `Router.choose`. place: future of its `Choice`. number: arrival order."""

    model: str
    queue: tuple[str, bool]
    names: tuple[str, ...]
    work: Work
    avoided: Collection[str]
    place: Future[Choice]
    number: int = field(default_factory=count().__next__)


class FairQueue:
    """Requests that wait for the same engines, in start-time fair order (Goyal, Vin and Cheng, SIGCOMM 1996).

    A request's virtual start, in tokens, is the virtual end of its owner's previous request, but at least the virtual
    start of the request that was served last. So an owner's backlog does not delay other owners' first requests, idle
    time earns no credit, and an unserved request costs nothing. tickets: by owner, each owner's oldest first."""

    def __init__(self) -> None:
        self.tickets: defaultdict[str, dict[Ticket, None]] = defaultdict(dict)
        self._ends = Counter[str]()
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self.tickets.values()))

    def __iter__(self) -> Iterator[Ticket]:
        """Yield all tickets by virtual start, then by arrival."""
        starts = (self._starts(owner, [*tickets]) for owner, tickets in self.tickets.items())
        return (ticket for _, _, ticket in merge(*starts))

    def _starts(self, owner: str, tickets: list[Ticket]) -> Iterator[tuple[int, int, Ticket]]:
        start = max(self._ends[owner], self._now)
        for ticket in tickets:
            yield start, ticket.number, ticket
            start += ticket.work.tokens

    def remove(self, ticket: Ticket, *, served: bool) -> bool:
        """Remove a request; False if it is not queued. served: it got a replica, so charge its owner for its tokens."""
        owner = ticket.work.owner
        if ticket not in self.tickets.get(owner, ()):
            return False
        del self.tickets[owner][ticket]
        if not self.tickets[owner]:
            del self.tickets[owner]
        if served:
            self._now = max(self._ends[owner], self._now)
            self._ends[owner] = self._now + ticket.work.tokens
        return True


class Holds:
    """All waiting requests: one fair queue for each class and each model with its own engines, shared by the adapters
    and versions on these engines. Empty queues are removed. most: limit of waiting requests of each class."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.queues: defaultdict[tuple[str, bool], FairQueue] = defaultdict(FairQueue)

    def add(self, ticket: Ticket) -> bool:
        """Queue a request; False if too many wait already."""
        batch = ticket.work.batch
        if sum(len(queue) for (_, of_class), queue in self.queues.items() if of_class is batch) >= self.most:
            return False
        self.queues[ticket.queue].tickets[ticket.work.owner][ticket] = None
        return True

    def place(self, router: Router, now_s: float) -> None:
        """Place waiting requests on replicas with free capacity, class batch last."""
        for _, queue in sorted(self.queues.items(), key=lambda item: item[0][1]):
            with_room = {ticket.names for tickets in queue.tickets.values() for ticket in tickets}
            for ticket in queue:
                if not with_room:
                    break  # thousands may wait, and `place` runs whenever a request ends
                if ticket.names not in with_room:
                    continue
                if (choice := router.choose(ticket.names, ticket.work, now_s, ticket.avoided)) is None:
                    with_room.remove(ticket.names)
                else:
                    self.remove(ticket, served=True)
                    ticket.place.set_result(choice)

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """End a request's wait with an error, if it still waits."""
        if self.remove(ticket):
            ticket.place.set_exception(error)

    def remove(self, ticket: Ticket, *, served: bool = False) -> bool:
        """Remove a request from its queue; False if it is not queued."""
        removed = self.queues[ticket.queue].remove(ticket, served=served)
        if not self.queues[ticket.queue].tickets:
            del self.queues[ticket.queue]
        return removed

    def models(self) -> Counter[str]:
        """Return the number of waiting requests by model, without class batch."""
        waiting = (queue for (_, batch), queue in self.queues.items() if not batch)
        return Counter(ticket.model for queue in waiting for tickets in queue.tickets.values() for ticket in tickets)


def _score(name: str, beginning: int) -> int:
    # CRC is linear: used alone, it would order replicas by a few bits of the text. The multiplication mixes all bits.
    return zlib.crc32(name.encode(), zlib.crc32(beginning.to_bytes(4, "little"))) * 0x9E3779B1 & 0xFFFFFFFF
