"""Makes requests with a form take turns, so that the masks of one step take a bounded time, whoever sent the requests
and however many there are.

vLLM asks the grammar of each request in a step which tokens may follow, one request after the other, and all requests
wait for it. step_bounds.py bounds one mask, but one owner may have as many requests as the engine has places: sixty,
with texts of five bounded lengths and a vocabulary of 4,096, took a neighbour's stream from 72 tokens a second to 2.5.

So each step has only as many of the requests with slow masks as fit into STEP_S, owner by owner; the others wait for a
later step, and so do new ones. A mask that alone takes longer is made in at most half of the time while others are
written.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from serve.api.turns import owner_in

STEP_S = 0.05
# A quicker mask, as most are, is in every step: 256 of them take as long as a step of a large model.
SHORT_S = 0.0005
_OWNERS = 4096
MASK = "shm_mask_s"
"""Attribute of a grammar: the seconds that one of its masks takes, estimated from the last ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose mask takes `cost_s`. served: the number of the last step that it was in, -1 before the first."""

    name: str
    owner: int
    cost_s: float
    served: int


class MaskTurns:
    """Chooses the next request: the one that has waited longest, of the owner who has waited longest."""

    def __init__(self) -> None:
        self._step = 0
        self._served: dict[str, int] = {}
        self._owners: dict[int, int] = {}
        self._rests_until_s = 0.0

    def chosen(self, candidates: list[tuple[str, int, float]], now_s: float, *, others: bool) -> set[str]:
        """Names of the requests that are in this step. candidates: (name, owner's mark, seconds of its mask). others:
        whether the step has requests without such a mask; if not, at least one is chosen."""
        self._step += 1
        self._served = {name: self._served.get(name, -1) for name, _, _ in candidates}
        queues: dict[int, list[Candidate]] = {}
        for name, owner, cost_s in candidates:
            queues.setdefault(owner, []).append(Candidate(name, owner, cost_s, self._served[name]))
        if len(self._owners) > _OWNERS:
            self._owners = {owner: step for owner, step in self._owners.items() if owner in queues}
        if others and now_s < self._rests_until_s:
            return set()
        for queue in queues.values():
            queue.sort(key=lambda one: one.served, reverse=True)  # the one that has waited longest is last
        found: set[str] = set()
        spent_s = 0.0
        while queues:
            owner = min(queues, key=lambda one: self._owners.get(one, -1))
            one = queues[owner].pop()
            if found and spent_s + one.cost_s > STEP_S:
                break
            found.add(one.name)
            spent_s += one.cost_s
            self._served[one.name] = self._owners[owner] = self._step
            if not queues[owner]:
                del queues[owner]
        if spent_s > STEP_S:
            self._rests_until_s = now_s + 2 * spent_s  # it takes the first half itself
        return found


def apply(grammars: Iterable[Any]) -> None:
    """Call once per process, before it makes its engine. grammars: classes of vLLM's StructuredOutputGrammar."""
    for grammar in grammars:
        grammar.fill_bitmask = _measured(grammar.fill_bitmask)
    Scheduler.schedule = _in_turns(Scheduler.schedule)
    Scheduler._handle_blocked_waiting_request = _unless_later(Scheduler._handle_blocked_waiting_request)


def _measured(fill: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fill)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        filled = fill(self, *args, **kwargs)
        took_s = time.thread_time() - began_s
        # After one quick mask a grammar still counts as slow for a few tokens: how long a mask takes depends on the
        # text.
        setattr(self, MASK, max(took_s, (getattr(self, MASK, 0.0) + took_s) / 2))
        return filled

    return run


def _in_turns(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        later = _later(self)
        self.__dict__["shm_later"] = later
        hidden = [request for request in self.running if request.request_id in later] if later else []
        if not hidden:
            return schedule(self, *args, **kwargs)
        active = self.max_num_active_reqs
        self.running = [request for request in self.running if request.request_id not in later]
        self.max_num_active_reqs = active - len(hidden)
        try:
            with _adapters_kept(self, hidden):
                return schedule(self, *args, **kwargs)
        finally:
            self.max_num_active_reqs = active
            self.running = [*self.running, *hidden]

    return run


@contextmanager
def _adapters_kept(scheduler: Scheduler, hidden: list[Request]) -> Iterator[None]:
    """Reserve the places in a batch of adapters that only hidden requests use. When new requests got these places, one
    step had too many adapters once all requests were back, and vLLM's scheduler died ("scheduled_loras")."""
    config = scheduler.lora_config
    if not config:
        yield
        return
    most = config.max_loras
    theirs, shown = (
        {request.lora_request.lora_int_id for request in requests if request.lora_request}
        for requests in (hidden, scheduler.running)
    )
    config.max_loras = most - len(theirs - shown)
    try:
        yield
    finally:
        config.max_loras = most


def _later(scheduler: Scheduler) -> set[str]:
    """Names of the requests for whose masks this step has no time."""
    slow: list[tuple[str, int, float]] = []
    spent_s = 0.0
    # A heap yields its items in order, which takes longer and is not needed here.
    for request in (*scheduler.running, *getattr(scheduler.waiting, "_heap", scheduler.waiting)):
        if (cost_s := _cost_s(request)) >= SHORT_S:
            slow.append((request.request_id, owner_in(request.priority), cost_s))
            spent_s += cost_s
    if spent_s <= STEP_S:
        return set()
    turns = scheduler.__dict__.setdefault("shm_mask_turns", MaskTurns())
    names = {name for name, _, _ in slow}
    others = any(request.request_id not in names for request in scheduler.running)
    return names - turns.chosen(slow, time.monotonic(), others=others)


def _cost_s(request: Request) -> float:
    """Seconds of the request's mask; 0 until its prompt is computed, because it gets no mask before."""
    form = request.structured_output_request
    if form is None or 0 < request.num_computed_tokens < request.num_tokens - 1:
        return 0.0
    cost_s: float = getattr(form.grammar, MASK, 0.0)  # None while it is compiled
    return cost_s


def _unless_later(ready: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(ready)
    def run(self: Scheduler, request: Request) -> bool:
        return ready(self, request) and request.request_id not in self.__dict__.get("shm_later", ())

    return run
