"""Answers a request that vLLM cannot read as the request's fault: 400, in words about requests.

vLLM reads a request in many steps before its core computes anything: its models of requests, conversions from one API
to another, the chat template, checks of parameters and grammars. A value that a step does not expect makes it raise
`AttributeError`, `KeyError` and the like, which vLLM answers with 500 and Python's own text. Errors of the machine
(`OSError`, `MemoryError`, a dead core) stay as they are.
"""

from __future__ import annotations

from pydantic import ValidationError
from vllm.exceptions import VLLMError, VLLMValidationError

from runtime.pydantic_words import words_of_check

_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, UnicodeError)
KINDS = (ValueError, NotImplementedError, *_UNREADABLE)
# A value of the wrong type is not the fault if another type fits except for something else.
_OTHER_TYPE = ("_type", "literal_error", "union_tag_invalid")
UNREADABLE = (
    "A value in this request has a type or shape that is not expected in its place: compare messages, tools and "
    "formats with the documentation of this route."
)


def of_request(error: Exception) -> Exception:
    """What a client is told about an error that was raised while its request was read."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        fault = next((one for one in faults if not one["type"].endswith(_OTHER_TYPE)), faults[0])
        # Names of types are among the names of fields.
        place = ".".join(str(name) for name in fault["loc"] if isinstance(name, int) or name.islower())
        return VLLMValidationError(f"Invalid value for `{place or 'messages'}`: {words_of_check(fault['msg'])}")
    if isinstance(error, VLLMError) or not isinstance(error, KINDS):
        return error
    return VLLMValidationError(UNREADABLE if isinstance(error, _UNREADABLE) else str(error))
