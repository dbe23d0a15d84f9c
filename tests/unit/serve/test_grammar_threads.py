"""Threads that compile grammars give way, and those that they start do too."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from serve.api.grammar_threads import NICENESS, give_way


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_of_the_pool_and_theirs_have_the_lowest_priority_and_nobody_else():
    before = niceness()
    manager = SimpleNamespace(executor=ThreadPoolExecutor(2))
    give_way(manager)
    inherited: list[int] = []

    def compile_grammar() -> int:
        helper = threading.Thread(target=lambda: inherited.append(niceness()))
        helper.start()
        helper.join()
        return niceness()

    with manager.executor as pool:
        assert pool._max_workers == 2
        assert pool.submit(compile_grammar).result() == NICENESS and inherited == [NICENESS]
    assert niceness() == before


def test_a_model_without_structured_outputs_is_left_alone():
    manager = SimpleNamespace()
    give_way(manager)
    assert not hasattr(manager, "executor")
