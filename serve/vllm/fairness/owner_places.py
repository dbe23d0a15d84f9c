"""Gives every waiting owner one of an engine's places, and one of its adapter places, even if others have all of them.

An engine computes `max_num_seqs` answers at once, and vLLM lets each run to its end. An owner with that many long
answers had all places, and another one waited until one of them ended: 220 s where 64 answers of 500 tokens were
written on one core.

So if all places are taken and an owner without one waits, the newest answer of the owner with the most places gives up
its place and goes on in the next free one. It is computed again up to where it was, mostly from the prefix cache.

A step takes `max_loras` adapters, and vLLM lets each stay while one of its answers is written: with four adapters and a
few long answers, an owner kept everybody else's adapters from the engine for as long as he went on asking. So if an
owner without an adapter there waits for one, the owner with the most adapters loses the place of one, with all its
answers. If nobody has several, the adapter that has been there longest gives up its place, after TURN_S.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serve.api.adapter_steps import loads_of
from serve.api.turns import ROLLOUTS, mark_of, number, owner_in, place_in

AGAIN_S = 0.5
"""Room is made for one owner at most this often. Otherwise, with each of an owner's successive short questions,
another's answer would be computed again."""
TURN_S = 5.0
"""How long an owner's only adapter stays, at least, while others wait: longer than it takes to compute its answers
again."""
LOOK_S = 0.1
"""All waiting requests are searched for adapters at most this often."""


def apply() -> None:
    """Call once per process, before it makes its engine."""
    Scheduler.schedule = _with_room(Scheduler.schedule)


def _with_room(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if self.waiting:
            make_rooms(self, time.monotonic())
        return schedule(self, *args, **kwargs)

    return run


def make_rooms(scheduler: Scheduler, now_s: float) -> None:
    """Makes room of both kinds if something waits, and gives a turn to owners without a place. now_s: monotonic."""
    if scheduler.lora_config:
        make_adapter_room(scheduler, now_s)
    if len(scheduler.running) >= scheduler.max_num_active_reqs:
        make_room(scheduler, now_s)
    else:
        give_turns(scheduler)


def give_turns(scheduler: Scheduler) -> None:
    """An owner who waits and has no place comes before one who has some. The queue orders by what owners have been
    served, and waiting requests have cost nothing yet: behind 32 choices of one owner, a short request waited for all
    of them."""
    waiting = scheduler.waiting
    if not isinstance(waiting, PriorityRequestQueue):
        return
    have = {owner_in(request.priority) for request in scheduler.running}
    have.add(mark_of(ROLLOUTS))
    firsts, others = dict[int, Request](), list[Request]()
    adapter_fits = _adapter_fits(scheduler, scheduler.running)
    for request in waiting._heap:
        if (mark := owner_in(request.priority)) in have:
            others.append(request)
        elif (mark not in firsts or request < firsts[mark]) and may_run(request) and adapter_fits(request):
            firsts[mark] = request
    if not firsts or not others:
        return
    before = min(others)
    for request in sorted(firsts.values(), reverse=True):
        if before < request:
            _move(scheduler, request, place_in(waiting.peek_request().priority) - 1)


def make_room(scheduler: Scheduler, now_s: float) -> None:
    """Make room for one waiting request, if its owner has no place and another owner has several. now_s: monotonic."""
    waiting = scheduler.waiting
    if not isinstance(waiting, PriorityRequestQueue):  # a deployment's own arguments may say so
        return
    made: dict[int, float] = scheduler.__dict__.setdefault("shm_room_made", {})  # owner's mark -> when
    have = Counter(owner_in(one.priority) for one in scheduler.running)
    (greatest, places), *_ = have.most_common(1) or [(0, 0)]
    if places < 2:
        return
    of_greatest = [request for request in scheduler.running if owner_in(request.priority) == greatest]
    newest = min(of_greatest, key=lambda request: (request.num_tokens, -request.arrival_time))
    adapter_fits = _adapter_fits(scheduler, [request for request in scheduler.running if request is not newest])
    without = [
        request
        for request in waiting._heap
        if (mark := owner_in(request.priority)) not in have
        and now_s - made.get(mark, -AGAIN_S) >= AGAIN_S
        and may_run(request)
        and adapter_fits(request)
    ]
    if not without:
        return
    first = min(without)
    made[owner_in(first.priority)] = now_s
    _exchange(scheduler, first, [newest], now_s)


def make_adapter_room(scheduler: Scheduler, now_s: float) -> None:
    """Make room for the adapter of one waiting request, if its owner has none there; not for rollouts, which the job's
    ranks make if no engine has room. now_s: monotonic."""
    state: dict[str, Any] = scheduler.__dict__.setdefault("shm_adapters", {"looked": 0.0, "since": {}, "made": {}})
    waiting, there = scheduler.waiting, dict[int, list[Request]]()
    if now_s - state["looked"] < LOOK_S or not isinstance(waiting, PriorityRequestQueue):
        return
    state["looked"] = now_s
    for request in scheduler.running:
        if request.lora_request:
            there.setdefault(request.lora_request.lora_int_id, []).append(request)
    state["since"] = {adapter: state["since"].get(adapter, now_s) for adapter in there}
    if not there or len(there) < scheduler.lora_config.max_loras:
        return
    owners = {adapter: {owner_in(one.priority) for one in theirs} for adapter, theirs in there.items()}
    have = Counter(mark for marks in owners.values() for mark in marks)
    rollouts = mark_of(ROLLOUTS)
    without = [
        request
        for request in waiting._heap
        if request.lora_request
        and request.lora_request.lora_int_id not in there
        and (mark := owner_in(request.priority)) not in have
        and mark != rollouts
        and now_s - state["made"].get(mark, -AGAIN_S) >= AGAIN_S
        and loads_of(scheduler).takes(request.lora_request.lora_int_id)
        and may_run(request)
    ]
    # If several owners use an adapter, the one with the fewest counts.
    least = {adapter: min(have[mark] for mark in marks) for adapter, marks in owners.items()}
    may_go = [one for one in there if least[one] > 1 or now_s - state["since"][one] >= TURN_S]
    if not without or not may_go:
        return
    first = min(without)
    state["made"] = {mark: at for mark, at in state["made"].items() if now_s - at < AGAIN_S}
    state["made"][owner_in(first.priority)] = now_s
    gone = min(may_go, key=lambda one: (-least[one], state["since"][one], len(there[one])))
    _exchange(scheduler, first, there[gone], now_s)


def _exchange(scheduler: Scheduler, first: Request, gone: list[Request], now_s: float) -> None:
    """Make `first` the next request that is taken; these, which are running, wait behind it."""
    _move(scheduler, first, place_in(scheduler.waiting.peek_request().priority) - 1)
    for request in gone:
        scheduler.running.remove(request)
        # It is queued behind the request that takes its place; otherwise it would take the place itself.
        behind = max(place_in(request.priority), place_in(first.priority) + 1)
        request.priority = number(behind, owner_in(request.priority))
        scheduler._preempt_request(request, now_s)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _adapter_fits(scheduler: Scheduler, batch: list[Request]) -> Callable[[Request], bool]:
    """Whether `batch` has room for the adapter of a request, and may load it. Otherwise the scheduler would pass it
    over, and a place would have been given up for nothing."""
    there = {one.lora_request.lora_int_id for one in batch if one.lora_request}  # once, not for each that waits

    def fits(request: Request) -> bool:
        if not scheduler.lora_config or not request.lora_request:
            return True
        adapter = request.lora_request.lora_int_id
        room = adapter in there or len(there) < scheduler.lora_config.max_loras
        return room and loads_of(scheduler).takes(adapter)

    return fits


def _move(scheduler: Scheduler, request: Request, place: int) -> None:
    scheduler.waiting.remove_request(request)
    request.priority = number(place, owner_in(request.priority))
    scheduler.waiting.add_request(request)


def may_run(request: Request) -> bool:
    """Whether nothing but a place keeps a waiting request from running."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return request.structured_output_request.grammar is not None
    return not Scheduler._is_blocked_waiting_status(request.status)
