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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from scheduler.core.routing_rules import PENDING_TO_TOTAL

OPEN, DRAINING = "open", "draining"

# How far the preferred replica's load may exceed the least loaded one's: a factor, and slack in tokens so that affinity
# holds at low load, where the cache is worth more than balance.
AFFINITY_FACTOR = 1.25
AFFINITY_SLACK_TOKENS = 4096

_PENDING_TO_TOTAL: Final = PENDING_TO_TOTAL

SUSPECT_FIRST_S = 0.25
SUSPECT_MAX_S = 4.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as one model's row of the routing table names it. avoid: its engine gives no sign of life, so that
    others are preferred."""

    id: str
    socket: str
    version: str
    state: str
    avoid: bool = False


@dataclass(frozen=True, slots=True)
class Canary:
    """Another version that takes a share (0 to 1) of a model's requests. name: its own row. since_s: its start in
    seconds since 1970, which identifies this canary."""

    name: str
    share: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why no replica of a model starts. next_try_s: in seconds since 1970. hold_before_s: requests wait for the next
    try if it is at most this far away."""

    reason: str
    next_try_s: float
    hold_before_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """One model's row of the routing table. hold_s: how long its requests may wait for a replica. max_model_len: the
    context of its engines in tokens, None where unknown. owners: of keys for which it exists, None: for all.
    adapter: the name by which its replicas, which serve its base, know it; empty where they serve the model itself.
    chats: False for one that is known to have no chat template."""

    name: str
    version: str
    state: str
    task: str
    hold_s: float
    replicas: tuple[Replica, ...] = ()
    max_model_len: int | None = None
    adapter: str = ""
    canary: Canary | None = None
    trouble: Trouble | None = None
    owners: frozenset[str] | None = None
    chats: bool = True


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
        return self.pending + self.tokens // _PENDING_TO_TOTAL


class Choice:
    """A request placed on a replica; pass it to `Router.end` exactly once. model: the row it was placed by, the
    canary's if the canary took it."""

    def __init__(
        self, model: str, replica: Replica, tokens: int, pending: int, stream: bool, load: Load, owner: str = ""
    ) -> None:
        self.model = model
        self.replica = replica
        self.tokens = tokens
        self.pending = pending
        self.stream = stream
        self.load = load
        self.owner = owner


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
        self._states: dict[str, tuple[str, str]] = {}

    def apply(self, models: Iterable[Model]) -> set[str]:
        """Replace the table. A replica that changed state, version or socket is no longer suspect. Returns the replicas
        that opened."""
        self.models = {model.name: model for model in models}
        states: dict[str, tuple[str, str]] = {}
        seen: dict[str, set[tuple[str, str, str]]] = {}
        for model in self.models.values():
            for replica in model.replicas:
                seen.setdefault(replica.id, set()).add((replica.socket, replica.version, replica.state))
        for replica_id, rows in seen.items():
            described = (str(sorted(rows)), DRAINING if all(row[2] != OPEN for row in rows) else OPEN)
            states[replica_id] = described
            load = self.loads.setdefault(replica_id, Load())
            if self._states.get(replica_id) != described:
                load.failures, load.suspect_until_s = 0, 0.0
        opened = {key for key, row in states.items() if row[1] == OPEN and self._states.get(key, ("", ""))[1] != OPEN}
        self._states = states
        self.loads = {key: load for key, load in self.loads.items() if key in states or load.inflight}
        return opened

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
        replica_id = choice.replica.id
        if replica_id not in self._states:
            self.loads.pop(replica_id, None)
            return True
        return self._states[replica_id][1] == DRAINING

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
