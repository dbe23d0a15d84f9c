"""Answers a request that vLLM cannot read as the request's fault: 400, in words about requests.

vLLM reads a request in many steps before its core computes anything: its models of requests, conversions from one API
to another, the chat template, checks of parameters and grammars. A value that a step does not expect makes it raise
`AttributeError`, `KeyError` and the like, which vLLM answers with 500 and Python's own text. Here all such errors of
these steps become 400. Nothing changes once the core has the request, nor for errors of the machine (`OSError`,
`MemoryError`, a dead core).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.v1.engine.exceptions import EngineGenerateError

from runtime.pydantic_words import words_of_check
from serve.api import answer_version

# Written for people, in vLLM as in templates.
_TOLD = (ValueError, NotImplementedError)
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, UnicodeError)
UNREADABLE = (
    "A value in this request has a type or shape that is not expected in its place: compare messages, tools and "
    "formats with the documentation of this route."
)
NO_TEMPLATE = (
    "This model has no chat template, so it knows no conversations: ask it with /v1/completions, or give it one with "
    "`appliance model deploy MODEL --chat-template FILE`."
)
# A value of the wrong type is not the fault if another type fits except for something else.
_OTHER_TYPE = ("_type", "literal_error", "union_tag_invalid")
_WORDS = 300


def apply() -> None:
    """Call once per process: vLLM's modules have the function by their own names for it."""
    seen = error_response.create_error_response
    made = _for_requests(seen)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(seen.__name__) is seen:
            setattr(module, seen.__name__, made)


def _for_requests(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_error_response(message: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, Exception):
            answer = answer_version.current()
            if answer is not None and not answer.begun:
                message = of_request(message)
        return create(message, *args, **kwargs)

    return create_error_response


def of_request(error: Exception) -> Exception:
    """What a client is told about an error that was raised while its request was read."""
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, VLLMError):
        return error
    if isinstance(error, ChatTemplateResolutionError):
        return VLLMValidationError(NO_TEMPLATE)
    if isinstance(error, ValidationError):
        return VLLMValidationError(_mismatch(error))
    if isinstance(error, _UNREADABLE):
        return VLLMValidationError(UNREADABLE)
    return VLLMValidationError(str(error)) if isinstance(error, _TOLD) else error


def _mismatch(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = next((one for one in found if not one["type"].endswith(_OTHER_TYPE)), found[0])
    # Names of types are among the names of fields.
    names = [str(name) for name in told["loc"] if str(name).islower() or isinstance(name, int)]
    # What a check of pydantic's says begins with pydantic's own words, and names no field where it looks at several.
    what = words_of_check(told["msg"])[:_WORDS].removesuffix(".")
    return f"Invalid value for `{'.'.join(names) or 'messages'}`: {what}."
