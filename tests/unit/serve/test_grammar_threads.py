"""Threads that compile grammars give way, and those that they start do too."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from serve.forms.grammar_threads import NICENESS, GrammarThreads, give_way


def form(*, left: bool = False) -> Any:
    """A request of vLLM's with a form."""
    return SimpleNamespace(is_finished=lambda: left)


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
        assert pool.submit(compile_grammar, form()).result() == NICENESS and inherited == [NICENESS]
    assert niceness() == before


def test_a_model_without_structured_outputs_is_left_alone():
    manager = SimpleNamespace()
    give_way(manager)
    assert not hasattr(manager, "executor")


def test_form_whose_request_has_left_is_not_compiled() -> None:
    with GrammarThreads(4) as pool:
        assert pool.submit(lambda request: 1 // 0, form(left=True)).result(timeout=30) is None
        assert pool.submit(lambda request: request, form()).result(timeout=30) is not None
