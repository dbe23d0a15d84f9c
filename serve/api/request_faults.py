"""Answers a request that vLLM cannot read as the request's fault: 400, in words about requests.

vLLM reads a request in many steps before its core computes anything: its models of requests, conversions from one API
to another, the chat template, checks of parameters and grammars. A value that a step does not expect makes it raise
`AttributeError`, `KeyError` and the like, which vLLM answers with 500 and Python's own text. Here such errors become
400 until the core has the request; errors of the machine (`OSError`, `MemoryError`, a dead core) never do.

A request for embeddings is read as text first. vLLM tries five models for each and writes an error for every token that
is not a message: 5 s for 100,000 tokens, on the loop that answers every owner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, ValidationError
from vllm.entrypoints.pooling.embed import protocol as embeddings
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from runtime.pydantic_words import words_of_check
from serve.api import answer_version

_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, UnicodeError)
# A value of the wrong type is not the fault if another type fits except for something else.
_OTHER_TYPE = ("_type", "literal_error", "union_tag_invalid")
UNREADABLE = (
    "A value in this request has a type or shape that is not expected in its place: compare messages, tools and "
    "formats with the documentation of this route."
)


def apply() -> None:
    """Call once per process, before vLLM makes its routes; its modules have the function by their own names for it."""
    kinds = get_args(embeddings.EmbeddingRequest)[0]  # of an annotated union
    embeddings.EmbeddingRequest = Annotated[
        Annotated[kinds, Field(union_mode="left_to_right")],
        BeforeValidator(embeddings.reject_removed_pooling_parameters),
    ]
    seen = error_response.create_error_response
    made = _for_requests(seen)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(seen.__name__) is seen:
            setattr(module, seen.__name__, made)


def _for_requests(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_error_response(message: Any, *args: Any, **kwargs: Any) -> Any:
        answer = answer_version.current()
        if isinstance(message, Exception) and answer is not None and not answer.begun:
            message = of_request(message)
        return create(message, *args, **kwargs)

    return create_error_response


def of_request(error: Exception) -> Exception:
    """What a client is told about an error that was raised while its request was read."""
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        fault = next((one for one in faults if not one["type"].endswith(_OTHER_TYPE)), faults[0])
        # Names of types are among the names of fields.
        place = ".".join(str(name) for name in fault["loc"] if isinstance(name, int) or name.islower())
        return VLLMValidationError(f"Invalid value for `{place or 'messages'}`: {words_of_check(fault['msg'])}")
    if isinstance(error, VLLMError) or not isinstance(error, (ValueError, NotImplementedError, *_UNREADABLE)):
        return error
    return VLLMValidationError(UNREADABLE if isinstance(error, _UNREADABLE) else str(error))
