"""Lets other requests pass one that waits and finds no KV memory.

vLLM admits no request while the next one in its queue finds no memory. So an owner with one running answer who sent a
prompt as long as the memory kept everybody from a nearly empty engine until that answer ended.

Here other owners' requests pass such a request; if its owner has none running, they do so only part of the time, or it
might never find memory. Other requests of its owner wait for it as before, and everybody does if answers fill the
memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serve.api.turns import owner_in

PASSED_S, HELD_S = 25.0, 5.0
"""How long others pass it, and then wait for it: as long as most short answers take."""
UNFIT = "shm_unfit"  # attribute of a request: an _Unfit
PASSED = "shm_passed"  # attribute of a scheduler: marks of owners one of whose requests is passed in its step


def apply() -> None:
    """Call once per process, before it makes its engine."""
    Scheduler.schedule = looked_anew(Scheduler.schedule)
    Scheduler._handle_blocked_waiting_request = let_pass(Scheduler._handle_blocked_waiting_request)
    KVCacheManager.allocate_slots = noted(KVCacheManager.allocate_slots)


@dataclass(slots=True)
class _Unfit:
    """A request that waits and found no memory. blocks: how many were free then."""

    blocks: int
    since_s: float


def looked_anew(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        setattr(self, PASSED, set())
        return schedule(self, *args, **kwargs)

    return run


def noted(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """allocate: KVCacheManager.allocate_slots. If it finds none, vLLM looks at no other waiting requests in this
    step."""

    @functools.wraps(allocate)
    def run(self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> Any:
        found = allocate(self, request, *args, **kwargs)
        before: _Unfit | None = getattr(request, UNFIT, None)
        if found is None and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            blocks = self.block_pool.get_num_free_blocks()
            setattr(request, UNFIT, _Unfit(blocks, before.since_s if before else time.monotonic()))
        elif before is not None:
            setattr(request, UNFIT, None)
        return found

    return run


def let_pass(ready: Callable[[Scheduler, Request], bool]) -> Callable[[Scheduler, Request], bool]:
    """ready: whether a request that waits may be scheduled."""

    @functools.wraps(ready)
    def run(self: Scheduler, request: Request) -> bool:
        if not ready(self, request):
            return False
        passed, mark = getattr(self, PASSED), owner_in(request.priority)
        if mark not in passed and _is_passed(self, request, mark, time.monotonic()):
            passed.add(mark)
        return mark not in passed

    return run


def kept_waiting(scheduler: Scheduler, now_s: float) -> Callable[[Request], bool]:
    """Whether others pass a request now, or it waits behind one of its owner's that is passed: making room would not
    get it admitted. now_s: monotonic."""
    first = dict[int, Request]()  # by owner's mark
    for request in getattr(scheduler.waiting, "_heap", scheduler.waiting):  # in whatever order
        mark = owner_in(request.priority)
        if (mark not in first or request < first[mark]) and _is_passed(scheduler, request, mark, now_s):
            first[mark] = request

    def kept(request: Request) -> bool:
        passed = first.get(owner_in(request.priority))
        return passed is not None and not request < passed

    return kept


def _is_passed(scheduler: Scheduler, request: Request, mark: int, now_s: float) -> bool:
    """Whether others pass it: it found no memory, and no more is free now."""
    found: _Unfit | None = getattr(request, UNFIT, None)
    if found is None or not scheduler.running:
        return False
    if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > found.blocks:
        return False
    if any(owner_in(one.priority) == mark for one in scheduler.running):
        return True
    return (now_s - found.since_s) % (PASSED_S + HELD_S) < PASSED_S
