"""Compiles grammars of structured outputs in low-priority threads that yield to the engine's steps.

vLLM compiles them in a pool beside its steps, and xgrammar releases the interpreter's lock, so a step never waits for
it. But its threads, up to eight per grammar, occupy the processors: with a grammar that took 5.6 s, another request's
token was delayed as long. On Linux every thread has its own niceness, which the threads it starts inherit.

vLLM's pool also compiles grammars that nobody waits for any more. Here one whose request has left before its turn is
not compiled.

vLLM passes schemas that xgrammar does not support to llguidance, and those that llguidance does not support either
(`patternProperties` beside a `multipleOf`) to outlines. outlines expands a schema into one regular expression and
parses it in Python, on the event loop that sends all tokens: 200 properties, 6 KB, took 9 s there, 600 more than two
minutes. So this module disables outlines.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# The line of vLLM's that makes the pool; and the niceness, with which a step gets 68 times the processor share of each
# such thread.
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


class GrammarThreads(ThreadPoolExecutor):
    """Compiles forms of requests."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="grammar", initializer=_nice)

    def submit(self, compile_form: Callable[[Any], Any], request: Any) -> Future[Any]:  # type: ignore[override]
        """request: of vLLM."""
        return super().submit(lambda: None if request.is_finished() else compile_form(request))


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
