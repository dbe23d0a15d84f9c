"""Compiles grammars of structured outputs in low-priority threads that yield to the engine's steps.

vLLM compiles them in a pool beside its steps, and xgrammar releases the interpreter's lock, so a step never waits for
it. But its threads, up to eight per grammar, occupy the processors: with a grammar that took 5.6 s, another request's
token was delayed as long. On Linux every thread has its own niceness, which the threads it starts inherit.

vLLM's pool, of half as many threads as there are processors, takes them in the order in which they came, also those
that nobody waits for any more: twenty texts of bounded length take half a minute, and whoever asked for such a form
again and again, and left, had everybody else's forms wait behind all of them. So here owners take turns, none has more
than half of the threads, and what was left before its turn is not compiled.

vLLM passes schemas that xgrammar does not support to llguidance, and those that llguidance does not support either
(`patternProperties` beside a `multipleOf`) to outlines. outlines expands a schema into one regular expression and
parses it in Python, on the event loop that sends all tokens: 200 properties, 6 KB, took 9 s there, 600 more than two
minutes. So this module disables outlines.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from serve.api.turns import owner_in

# vLLM's name for the pool; and the niceness, which gives a step 68 times the processor share of each such thread.
POOL = "self.executor = ThreadPoolExecutor("
NICENESS = 19
LEAST_THREADS = 4
CHECK = "validate_structured_output_request_outlines"


def give_way(manager: Any) -> None:
    """Give a StructuredOutputManager that has compiled nothing yet a pool of low-priority threads."""
    old = getattr(manager, "executor", None)
    if old is None:
        return  # a model without a tokenizer takes no structured outputs
    manager.executor = GrammarThreads(max(LEAST_THREADS, old._max_workers))
    old.shutdown(wait=False)


class GrammarThreads(Executor):
    """Compiles forms of requests, owners taking turns."""

    def __init__(self, threads: int) -> None:
        self._threads, self._most = threads, threads // 2
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar", initializer=_nice)
        self._lock = threading.RLock()  # what was compiled at once ends within `_begin`
        self._waiting: dict[int, deque[tuple[Future[Any], Callable[[Any], Any], Any]]] = {}  # by owner's mark
        self._at_work = Counter[int]()
        self._served: dict[int, int] = {}  # of owners who wait or are at work: the number of their last turn
        self._turn = 0

    def submit(self, compile_form: Callable[[Any], Any], request: Any) -> Future[Any]:  # type: ignore[override]
        """request: of vLLM. What it waits for is cancelled where the request has ended before its turn."""
        future, owner = Future[Any](), owner_in(request.priority)
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, compile_form, request))
            self._begin()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            if cancel_futures:
                for theirs in self._waiting.values():
                    for future, _, _ in theirs:
                        future.cancel()
                self._waiting.clear()
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _begin(self) -> None:
        """With the lock: free threads go to who has fewest of them, and then to who had his last turn longest ago."""
        while self._at_work.total() < self._threads:
            may = [owner for owner in self._waiting if self._at_work[owner] < self._most]
            if not may:
                return
            owner = min(may, key=lambda one: (self._at_work[one], self._served.get(one, -1)))
            future, compile_form, request = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if request.is_finished():
                future.cancel()
                continue
            self._turn += 1
            self._served[owner] = self._turn
            self._at_work[owner] += 1
            compiled = self._pool.submit(compile_form, request)
            compiled.add_done_callback(functools.partial(self._ended, owner, future))

    def _ended(self, owner: int, future: Future[Any], compiled: Future[Any]) -> None:
        if compiled.cancelled():
            future.cancel()
        elif error := compiled.exception():
            future.set_exception(error)
        else:
            future.set_result(compiled.result())
        with self._lock:
            self._at_work[owner] -= 1
            if not self._at_work[owner]:
                del self._at_work[owner]
                if owner not in self._waiting:
                    self._served.pop(owner, None)
            self._begin()


def no_outlines(backend: Any) -> None:
    """backend: vLLM's module of that backend; its check runs before vLLM passes it a schema."""
    setattr(backend, CHECK, _refuse)


def _refuse(params: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(
        "This form has features that no grammar backend of this server has together: give a JSON schema without "
        "`patternProperties`, or without `multipleOf`, `uniqueItems`, `contains`, `propertyNames` and formats of texts."
    )


def _nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
