"""Bounds how long an engine's steps wait for LoRA adapters to be loaded, while all its answers stand still.

vLLM's worker keeps some adapters in memory and loads the others within the step that needs them, all that a step takes:
when one owner had twice as many as it keeps, each step waited for four.

Here a step takes at most one adapter that is not loaded, from the owner whose last load is longest ago. Afterwards,
steps run without a load for as long as it took, if anybody is being answered. Adapters that are loaded between two
steps, because a request names them for the first time, are also loaded one at a time (serve.adapters.load_turns).
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from serve.api.turns import ROLLOUTS, mark_of, owner_in
from serve.api.unfit_requests import kept_waiting

BEGAN = "shm_load_began_s"  # attribute of a SchedulerOutput whose step loads an adapter


def apply() -> None:
    """Call once per process, before it makes its engine."""
    EngineCore.add_lora, EngineCore.remove_lora = timed(EngineCore.add_lora), told(EngineCore.remove_lora)
    Scheduler.schedule = bounded(Scheduler.schedule)
    Scheduler.update_from_output = measured(Scheduler.update_from_output)
    Scheduler._handle_blocked_waiting_request = held_back(Scheduler._handle_blocked_waiting_request)


class Loads:
    """What a scheduler knows of its workers' adapters.

    there: those that are loaded, the one that was used longest ago first; a worker keeps `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.there = OrderedDict[int, None]()
        self._of_owners: dict[int, int] = {}  # owner's mark -> number of his last load
        self._number = 0
        self._next_s = 0.0
        self._chosen: int | None = None

    def choose(self, scheduler: Scheduler, now_s: float) -> None:
        """Which adapter that is not there the next step may take, if any. now_s: monotonic."""
        self._chosen = None
        if (now_s < self._next_s and scheduler.running) or not isinstance(scheduler.waiting, PriorityRequestQueue):
            return
        running = [one for one in scheduler.running if one.lora_request]
        full = len({one.lora_request.lora_int_id for one in running}) >= scheduler.lora_config.max_loras
        # If all places are taken, room is made for owners who have none (serve.vllm.fairness.owner_places), but not for
        # rollouts.
        have = {mark_of(ROLLOUTS), *(owner_in(one.priority) for one in running)} if full else set()
        waiting = [
            (self._of_owners.get(mark, 0), request)
            for request in scheduler.waiting._heap
            if request.lora_request
            and request.lora_request.lora_int_id not in self.there
            and (mark := owner_in(request.priority)) not in have
            and not Scheduler._is_blocked_waiting_status(request.status)
        ]
        if waiting:
            # An adapter that no step takes is not chosen either: while it was, nobody else's was loaded.
            kept = kept_waiting(scheduler, now_s)
            waiting = [one for one in waiting if not kept(one[1])]
        if waiting:
            self._chosen = min(waiting)[1].lora_request.lora_int_id

    def takes(self, adapter: int) -> bool:
        """Whether the next step may take a request with this adapter."""
        return adapter in self.there or adapter == self._chosen

    def used(self, adapters: Iterable[int]) -> bool:
        """Note those that a step uses, or that were loaded; whether one of them was not there."""
        found = False
        for adapter in adapters:
            found |= adapter not in self.there
            self.there[adapter] = None
            self.there.move_to_end(adapter)
        while len(self.there) > self.capacity:
            self.there.popitem(last=False)
        return found

    def begun(self, requests: Iterable[Request]) -> bool:
        """A step is about to compute these; whether it loads an adapter."""
        by_adapter = {one.lora_request.lora_int_id: one for one in requests if one.lora_request}
        for adapter in by_adapter.keys() - self.there.keys():
            self._number += 1
            self._of_owners[owner_in(by_adapter[adapter].priority)] = self._number
        return self.used(by_adapter)

    def loaded(self, now_s: float, took_s: float) -> None:
        """A step that loaded one has ended."""
        self._next_s = now_s + took_s


def loads_of(scheduler: Any) -> Loads:
    if (found := scheduler.__dict__.get("shm_loads")) is None:
        found = scheduler.__dict__["shm_loads"] = Loads(scheduler.lora_config.max_cpu_loras)
    return found


def timed(add: Callable[[Any, Any], Any]) -> Callable[[Any, Any], float]:
    """add: EngineCore.add_lora, which then returns the seconds it took."""

    @functools.wraps(add)
    def run(self: Any, request: Any) -> float:
        began_s = time.monotonic()
        add(self, request)
        loads_of(self.scheduler).used([request.lora_int_id])
        return time.monotonic() - began_s

    return run


def told(remove: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    """remove: EngineCore.remove_lora."""

    @functools.wraps(remove)
    def run(self: Any, adapter: int) -> bool:
        loads_of(self.scheduler).there.pop(adapter, None)
        return remove(self, adapter)

    return run


def bounded(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if not self.lora_config:
            return schedule(self, *args, **kwargs)
        loads, now_s = loads_of(self), time.monotonic()
        loads.choose(self, now_s)
        output = schedule(self, *args, **kwargs)
        if loads.begun(self.running):
            setattr(output, BEGAN, now_s)
        return output

    return run


def measured(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def run(self: Scheduler, output: Any, *args: Any, **kwargs: Any) -> Any:
        if (began_s := getattr(output, BEGAN, None)) is not None:
            now_s = time.monotonic()
            loads_of(self).loaded(now_s, now_s - began_s)
        return update(self, output, *args, **kwargs)

    return run


def held_back(ready: Callable[[Scheduler, Request], bool]) -> Callable[[Scheduler, Request], bool]:
    """ready: whether a request that waits may be scheduled."""

    @functools.wraps(ready)
    def run(self: Scheduler, request: Request) -> bool:
        if not ready(self, request):
            return False
        return not request.lora_request or loads_of(self).takes(request.lora_request.lora_int_id)

    return run
