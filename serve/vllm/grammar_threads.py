"""Grammars of structured outputs are compiled by threads that give way to the engine's steps.

vLLM compiles them in a pool beside its steps, and xgrammar lets go of Python's lock, so a step never waits for one. But
its threads, up to eight for each grammar, take the processors: with a grammar that took 5.6 s a neighbour's token came
after as long. On Linux every thread has a niceness of its own, which those that it starts inherit.

What xgrammar cannot do vLLM gives to llguidance, and what that cannot do either (`patternProperties` beside a
`multipleOf`) to outlines, which writes a schema out as one regular expression and parses that in Python, on the loop
that sends everybody's tokens: 200 properties, 6 KB, took 9 s there, 600 more than two minutes. So nothing is given to
it.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# What vLLM calls the pool, and how a step's share of a processor compares with that of all such threads: 68 to 1 each.
POOL = "self.executor = ThreadPoolExecutor("
NICENESS = 19
CHECK = "validate_structured_output_request_outlines"


def give_way(manager: Any) -> None:
    """Give a StructuredOutputManager, which has compiled nothing yet, a pool of such threads."""
    old = getattr(manager, "executor", None)
    if old is None:
        return  # a model without a tokenizer takes no structured outputs
    manager.executor = ThreadPoolExecutor(old._max_workers, thread_name_prefix="grammar", initializer=_nice)
    old.shutdown(wait=False)


def no_outlines(backend: Any) -> None:
    """backend: vLLM's module of that backend, whose check is asked before anything is given to it."""
    setattr(backend, CHECK, _refuse)


def _refuse(params: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(
        "This form has features that no grammar backend of this server has together: give a JSON schema without "
        "`patternProperties`, or without `multipleOf`, `uniqueItems`, `contains`, `propertyNames` and formats of texts."
    )


def _nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
