"""Simulates the gateway: routes requests to engines, holds them, and drives the simulation's clock.

Requests go to the open replica with the least work before a first token, as in the gateway's router
(`appliance.gateway.core.router`). Affinity for warm prefixes is not simulated, because traces have no text. If no
replica is open, requests are held up to `hold_s`; when one opens, requests without a first token move to it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque

from appliance.gateway.core.router import PENDING_TO_TOTAL
from benchmarks.simulator.engine import Engine, EngineModel, Served
from benchmarks.simulator.trace import Requests


def _weight(engine: Engine) -> int:
    return engine.pending_tokens + engine.tokens // PENDING_TO_TOTAL


def is_sooner_there(
    prompt_tokens: int, *, pending: tuple[int, int], inflight: tuple[int, int], stuck: bool = False
) -> bool:
    """Whether a newly opened engine would serve a waiting request earlier than its present engine.

    pending: prompt tokens of requests without a first token, as (here, there), with this request counted here.
    inflight: requests, likewise. stuck: no prompt is computed here, because its cache or batch is full.
    """
    here, there = pending
    return there + prompt_tokens <= here - prompt_tokens or (stuck and inflight[1] + 1 < inflight[0])


class Cluster:
    """All engines and the requests in progress. `advance` is fast if few events are due."""

    def __init__(self, requests: Requests, model: EngineModel, *, hold_s: float = 600.0, seed: int = 0):
        self.requests, self.model, self.hold_s = requests, model, hold_s
        self.served = Served.of(len(requests))
        self.now_s = 0.0
        self.held: deque[int] = deque()
        self.expired = 0
        self.last_request_s: float | None = None
        self._engines: dict[str, Engine] = {}
        self._open: list[str] = []
        self._next = 0
        self._due: list[tuple[float, str, int]] = []
        self._rng = random.Random(seed)

    def start(self, replica_id: str) -> None:
        self._engines[replica_id] = Engine(self.model, self.requests, self.served, self.now_s)

    def stop(self, replica_id: str) -> None:
        """Stop a replica, which must have no requests."""
        engine = self._engines.pop(replica_id, None)
        self.close(replica_id)
        assert engine is None or engine.inflight == 0, f"{replica_id} stopped with {engine.inflight} requests"

    def open(self, replica_id: str) -> None:
        if replica_id not in self._open:
            self._open.append(replica_id)
        self._engines[replica_id].now_s = self.now_s
        while self.held and self._open:
            self._route(self.held.popleft())
        self._move_to(replica_id)

    def _move_to(self, replica_id: str) -> None:
        """Move requests without a first token to a replica that has just opened, while it would serve them earlier."""
        to = self._engines[replica_id]
        while True:
            name = max(
                (n for n in self._open if n != replica_id), key=lambda n: _weight(self._engines[n]), default=None
            )
            if name is None or not (busiest := self._engines[name]).waiting:
                return
            size = self.requests.prompt[busiest.waiting[0]]
            pending, inflight = (busiest.pending_tokens, to.pending_tokens), (busiest.inflight, to.inflight)
            if not is_sooner_there(size, pending=pending, inflight=inflight, stuck=busiest.stuck):
                return
            for engine in (busiest, to):
                engine.advance(self.now_s)
            to.add(busiest.take_back())
            self._schedule(name, busiest)
            self._schedule(replica_id, to)

    def close(self, replica_id: str) -> None:
        if replica_id in self._open:
            self._open.remove(replica_id)

    def inflight(self, replica_id: str) -> int:
        engine = self._engines.get(replica_id)
        return engine.inflight if engine else 0

    @property
    def inflight_total(self) -> int:
        return sum(e.inflight for e in self._engines.values())

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests in flight and held."""
        held = sum(self.requests.prompt[r] for r in self.held)
        return held + sum(e.prompt_tokens for e in self._engines.values())

    @property
    def waiting_tokens(self) -> int:
        held = sum(self.requests.prompt[r] for r in self.held)
        return held + sum(e.waiting_tokens for e in self._engines.values() if e.waiting)

    @property
    def arrived(self) -> int:
        """Number of requests that have arrived."""
        return self._next

    @property
    def arrivals_left(self) -> bool:
        return self._next < len(self.requests)

    @property
    def next_arrival_s(self) -> float:
        return self.requests.arrival_s[self._next] if self.arrivals_left else math.inf

    def _route(self, request: int) -> None:
        names = self._open if len(self._open) <= 16 else self._rng.sample(self._open, 8)
        engines = self._engines
        name, engine = names[0], engines[names[0]]
        for other in names:
            if _weight(engines[other]) < _weight(engine):
                name, engine = other, engines[other]
        engine.advance(self.now_s)
        engine.add(request)
        self._schedule(name, engine)

    def _schedule(self, name: str, engine: Engine) -> None:
        at_s = engine.next_event_s()
        if at_s is not None:
            heapq.heappush(self._due, (at_s, name, engine.version))

    def advance(self, to_s: float) -> None:
        """Process all events up to and at `to_s`."""
        arrivals, total = self.requests.arrival_s, len(self.requests)
        while True:
            arrival_s = arrivals[self._next] if self._next < total else float("inf")
            due_s = self._due[0][0] if self._due else float("inf")
            at_s = min(arrival_s, due_s)
            if at_s > to_s:
                break
            self.now_s = max(self.now_s, at_s)
            if due_s <= arrival_s:
                _, name, version = heapq.heappop(self._due)
                engine = self._engines.get(name)
                if engine is None or engine.version != version:
                    continue
                engine.advance(self.now_s)
                engine.finish_events()
                self._schedule(name, engine)
                continue
            request, self._next = self._next, self._next + 1
            self.last_request_s = self.now_s
            if self._open:
                self._route(request)
            else:
                self.held.append(request)
        self.now_s = max(self.now_s, to_s)
        while self.held and self.now_s - arrivals[self.held[0]] > self.hold_s:
            self.held.popleft()
            self.expired += 1
