"""Gives every waiting owner one of an engine's places, even if another owner has all of them.

An engine computes `max_num_seqs` answers at once, and vLLM lets each run to its end. An owner with that many long
answers had all places, and another one waited until one of them ended: 220 s where 64 answers of 500 tokens were
written on one core.

So if all places are taken and an owner without one waits, the newest answer of the owner with the most places gives up
its place and goes on in the next free one. It is computed again up to where it was, mostly from the prefix cache.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from serve.api.turns import number, owner_in, place_in
from serve.cpu.finishing_scheduler import may_run

AGAIN_S = 0.5
"""Room is made for one owner at most this often. Otherwise an owner who asks one short question after the other would
have another's answer computed again for each."""


def apply() -> None:
    """Call once per process, before it makes its engine."""
    Scheduler.schedule = _with_room(Scheduler.schedule)


def _with_room(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if self.waiting and len(self.running) >= self.max_num_active_reqs:
            make_room(self, time.monotonic())
        return schedule(self, *args, **kwargs)

    return run


def make_room(scheduler: Scheduler, now_s: float) -> None:
    """Make room for one waiting request, if its owner has no place and another owner has several. now_s: monotonic."""
    waiting = scheduler.waiting
    if not isinstance(waiting, PriorityRequestQueue):  # a deployment's own arguments may say so
        return
    made: dict[int, float] = scheduler.__dict__.setdefault("shm_room_made", {})  # owner's mark -> when
    have = Counter(owner_in(request.priority) for request in scheduler.running)
    (greatest, places), *_ = have.most_common(1) or [(0, 0)]
    if places < 2:
        return
    of_greatest = [request for request in scheduler.running if owner_in(request.priority) == greatest]
    newest = min(of_greatest, key=lambda request: (request.num_tokens, -request.arrival_time))
    without = [
        request
        for request in waiting._heap
        if (mark := owner_in(request.priority)) not in have
        and now_s - made.get(mark, -AGAIN_S) >= AGAIN_S
        and may_run(request)
        and _adapter_fits(scheduler, request, newest)
    ]
    if not without:
        return
    first = min(without)
    made[owner_in(first.priority)] = now_s
    scheduler.running.remove(newest)
    _move(scheduler, first, place_in(scheduler.waiting.peek_request().priority) - 1)
    # It is queued behind the request that takes its place; otherwise it would take the place itself.
    newest.priority = number(max(place_in(newest.priority), place_in(first.priority) + 1), greatest)
    scheduler._preempt_request(newest, now_s)
    scheduler.prev_step_scheduled_req_ids.discard(newest.request_id)


def _adapter_fits(scheduler: Scheduler, request: Request, gone: Request) -> bool:
    """Whether the batch without `gone` has room for the adapter of `request`. Without room the scheduler would pass it
    over, and `gone` would have given up its place for nothing."""
    if not scheduler.lora_config or not request.lora_request:
        return True
    there = {one.lora_request.lora_int_id for one in scheduler.running if one is not gone and one.lora_request}
    return request.lora_request.lora_int_id in there or len(there) < scheduler.lora_config.max_loras


def _move(scheduler: Scheduler, request: Request, place: int) -> None:
    scheduler.waiting.remove_request(request)
    request.priority = number(place, owner_in(request.priority))
    scheduler.waiting.add_request(request)
