"""Threads that compile grammars give way, and those that they start do too; owners take turns."""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from serve.api.turns import mark_of, number
from serve.forms.grammar_threads import NICENESS, GrammarThreads, give_way


def form(owner: str, name: str = "", *, left: bool = False) -> Any:
    """A request of vLLM's with a form."""
    return SimpleNamespace(name=name, priority=number(7, mark_of(owner)), is_finished=lambda: left)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_of_the_pool_and_theirs_have_the_lowest_priority_and_nobody_else():
    before = niceness()
    manager = SimpleNamespace(executor=ThreadPoolExecutor(2))
    give_way(manager)
    inherited: list[int] = []

    def compile_grammar(request: Any) -> int:
        helper = threading.Thread(target=lambda: inherited.append(niceness()))
        helper.start()
        helper.join()
        return niceness()

    with manager.executor as pool:
        assert pool.submit(compile_grammar, form("ann")).result() == NICENESS and inherited == [NICENESS]
    assert niceness() == before


def test_a_model_without_structured_outputs_is_left_alone():
    manager = SimpleNamespace()
    give_way(manager)
    assert not hasattr(manager, "executor")


def test_forms_of_one_owner_keep_nobody_elses_from_being_compiled() -> None:
    """They were compiled in the order in which they came, those that nobody waited for any more too."""
    begun, may_end = queue.SimpleQueue[str](), defaultdict[str, threading.Event](threading.Event)

    def compile_grammar(request: Any) -> str:
        begun.put(request.name)
        assert may_end[request.name].wait(30)
        return request.name

    pool = GrammarThreads(4)
    names = [f"ann {number}" for number in range(20)]
    made = {name: pool.submit(compile_grammar, form("ann", name)) for name in names}
    left = pool.submit(compile_grammar, form("ann", "left", left=True))
    fails = pool.submit(lambda request: 1 // 0, form("ben", "ben 0"))
    assert isinstance(fails.exception(timeout=30), ZeroDivisionError), "with half of the threads at somebody else's"
    made |= {f"ben {number}": pool.submit(compile_grammar, form("ben", f"ben {number}")) for number in range(1, 4)}
    made["cyn"] = pool.submit(compile_grammar, form("cyn", "cyn"))
    order = list[str]()
    for _ in made:  # each ends as it has begun: threads that go as they like do all of one owner's first, now and then
        order.append(name := begun.get(timeout=30))
        may_end[name].set()
        assert made[name].result(timeout=30) == name
    assert left.cancelled()
    assert order.index("cyn") < 8 and order.index("ben 3") < 12, order
    pool.shutdown()
    assert not pool._threads._waiting and not pool._threads._at_work and not pool._threads._served


def test_forms_that_wait_are_not_compiled_where_an_engine_ends() -> None:
    go, pool = threading.Event(), GrammarThreads(4)
    futures = [pool.submit(lambda request: go.wait(30), form("ann")) for _ in range(5)]
    pool.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert [one.cancelled() for one in futures[2:]] == [True] * 3
