"""Chooses the replica that answers a request. Pure state: no sockets, no clock of its own, no asyncio.

A replica's load is the work that stands before a new request's first token: the prompts that have none yet, and a
little for all other tokens, which slow a step down. (Counting tokens to be generated like prompts sent long prompts to
engines that had one to compute, past engines that only generated.)

The rule is bounded-load affinity: requests with the same prefix prefer the same replica (its prefix cache is warm),
unless it is clearly more loaded than the least loaded one. Rendezvous hashing
(Thaler and Ravishankar 1998) names the preferred replica, so that adding one moves only its share; the bound
follows "Consistent Hashing with Bounded Loads" (Mirrokni et al. 2016).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from appliance.gateway.routing.table import OPEN, Model, Replica
from scheduler.core.routing_rules import PENDING_TO_TOTAL

# How far the preferred replica's load may exceed the least loaded one's: a factor, and slack in tokens so that affinity
# holds at low load, where the cache is worth more than balance.
AFFINITY_FACTOR = 1.25
AFFINITY_SLACK_TOKENS = 4096

SUSPECT_FIRST_S = 0.25
SUSPECT_MAX_S = 4.0


@dataclass(slots=True)
class Load:
    """What this gateway has outstanding on one replica. tokens: estimated prompt plus completion tokens; pending:
    prompt tokens of requests without a first token, as far as visible: until the end where nothing is streamed.
    owners: requests by owner."""

    inflight: int = 0
    streams: int = 0
    tokens: int = 0
    pending: int = 0
    failures: int = 0
    suspect_until_s: float = 0.0
    owners: dict[str, int] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        return self.pending + self.tokens // PENDING_TO_TOTAL


@dataclass(slots=True, eq=False)
class Choice:
    """A request placed on a replica; pass it to `Router.end` exactly once. model: the row it was placed by, the
    canary's if the canary took it."""

    model: str
    replica: Replica
    tokens: int
    pending: int
    stream: bool
    load: Load
    owner: str = ""


class Router:
    """Routing table plus outstanding work.

    A replica may serve several models (adapters on one base), so load is counted by replica id. Load of a
    replica that left the table is kept until its last request ends: the controller waits for that zero.
    """

    def __init__(self, *, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        # The last quarter of a replica's places is for those who have few there: an owner who has all of them keeps
        # everybody else from an engine in whose queue owners take turns.
        self._before_shares = max_inflight - max_inflight // 4
        self._share = max_inflight // 16
        self.models: dict[str, Model] = {}
        self.loads: dict[str, Load] = {}
        # By replica: how the rows of all models describe it.
        self._rows: dict[str, set[Replica]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """Replace the table. A replica that changed in it is no longer suspect."""
        self.models = {model.name: model for model in models}
        rows: defaultdict[str, set[Replica]] = defaultdict(set)
        for model in self.models.values():
            for replica in model.replicas:
                rows[replica.id].add(replica)
        for name, described in rows.items():
            load = self.loads.setdefault(name, Load())
            if self._rows.get(name) != described:
                load.failures, load.suspect_until_s = 0, 0.0
        self._rows = dict(rows)
        self.loads = {name: load for name, load in self.loads.items() if name in rows or load.inflight}

    def choose(
        self,
        name: str,
        tokens: int,
        stream: bool,
        prefix: Callable[[], bytes],
        now_s: float,
        pending: int = 0,
        avoid: tuple[str, ...] = (),
        owner: str = "",
    ) -> Choice | None:
        """Place a request; None if no replica of the model can take it now. Raises KeyError: unknown model.

        prefix: returns the beginning of the prompt; called only if there is a choice. pending: its prompt's tokens.
        avoid: replicas that take it only if no other can. owner: who asks."""
        best: Replica | None = None
        best_load: Load | None = None
        usable: list[tuple[Replica, Load]] = []
        loads = self.loads
        for avoided in (False, True):
            for replica in self.models[name].replicas:
                if replica.state != OPEN or (replica.avoid or replica.id in avoid) != avoided:
                    continue
                load = loads[replica.id]
                if load.inflight >= self.max_inflight or load.suspect_until_s > now_s:
                    continue
                if load.inflight >= self._before_shares and load.owners.get(owner, 0) >= self._share:
                    continue
                usable.append((replica, load))
                if best_load is None or load.weight < best_load.weight:
                    best, best_load = replica, load
            if best is not None:
                break
        if best is None or best_load is None:
            return None
        if len(usable) > 1:
            text = prefix()
            preferred, preferred_load = max(usable, key=lambda pair: _score(pair[0].id, text))
            if preferred_load.weight <= best_load.weight * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS:
                best, best_load = preferred, preferred_load
        best_load.inflight += 1
        best_load.streams += stream
        best_load.tokens += tokens
        best_load.pending += pending
        best_load.owners[owner] = best_load.owners.get(owner, 0) + 1
        return Choice(name, best, tokens, pending, stream, best_load, owner)

    def canary_for(self, name: str, caller: str, prefix: Callable[[], bytes]) -> str | None:
        """The row of the model's canary if this conversation is in its share. Raises KeyError: unknown model.

        It decides by caller and beginning of the prompt, so that a conversation stays on one version on every gateway.
        prefix: called only if there is a canary."""
        canary = self.models[name].canary
        if canary is None or canary.name not in self.models:
            return None
        return canary.name if _score(f"{name} {caller}", prefix()) < canary.share * 2**32 else None

    def started(self, choice: Choice) -> None:
        """The first token came: its prompt stands before no other."""
        load = choice.load
        load.pending -= choice.pending
        choice.pending = 0

    def end(self, choice: Choice) -> bool:
        """Remove a request from its replica. True if a draining replica has just become idle."""
        load = choice.load
        load.inflight -= 1
        load.streams -= choice.stream
        load.tokens -= choice.tokens
        self.started(choice)
        left = load.owners[choice.owner] - 1
        if left:
            load.owners[choice.owner] = left
        else:
            del load.owners[choice.owner]
        if load.inflight:
            return False
        rows = self._rows.get(choice.replica.id)
        if rows is None:
            self.loads.pop(choice.replica.id, None)
            return True
        return all(row.state != OPEN for row in rows)

    def fail(self, choice: Choice, now_s: float) -> None:
        """The replica did not answer: avoid it for a moment, longer after each repetition."""
        load = choice.load
        load.suspect_until_s = now_s + min(SUSPECT_FIRST_S * 2**load.failures, SUSPECT_MAX_S)
        load.failures = min(load.failures + 1, 16)

    def succeed(self, choice: Choice) -> None:
        """The replica answered: forget earlier failures."""
        choice.load.failures = 0

    def report(self) -> Mapping[str, dict[str, int]]:
        """Outstanding work by replica id, as the bus reports it."""
        return {
            key: {"inflight": load.inflight, "streams": load.streams, "waiting_tokens": load.tokens}
            for key, load in self.loads.items()
        }


def _score(replica_id: str, prefix: bytes) -> int:
    # CRC is linear, so alone the order of the replicas would depend on a few bits of the text; the product mixes them.
    of_prefix = zlib.crc32(prefix).to_bytes(4, "little")
    return zlib.crc32(replica_id.encode(), zlib.crc32(of_prefix)) * 0x9E3779B1 & 0xFFFFFFFF
