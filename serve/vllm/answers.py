"""Around vLLM's application: names the version of each answer, and counts the requests that the core does not have."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest

from runtime.pydantic_words import words_of_check

# The gateway reads it (appliance/gateway/server/inference.py), because its table can lag behind the engine.
VERSION_HEADER = b"x-appliance-model-version"
# What vLLM raises, and would answer with 500, where a request has a value that one of its steps does not expect.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, UnicodeError)
KINDS = (ValueError, NotImplementedError, *_UNREADABLE)
# A value of the wrong type is not the fault if another type fits except for something else.
_OTHER_TYPE = ("_type", "literal_error", "union_tag_invalid")
UNREADABLE = (
    "A value in this request has a type or shape that is not expected in its place: compare messages, tools and "
    "formats with the documentation of this route."
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Answer:
    """State of one HTTP answer. begun: the core has its request. adapter: what its request has found, until then."""

    begun: bool = False
    adapter: LoRARequest | None = None


_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_open: set[Answer] = set()


def current() -> Answer | None:
    """The answer that the calling task makes."""
    return _ANSWER.get()


def begin() -> None:
    """The core has the request whose task calls this."""
    if (answer := _ANSWER.get()) is not None:
        answer.begun, answer.adapter = True, None


def fault_of(error: Exception) -> Exception:
    """The error to answer: until the core has the request, most errors are the request's fault."""
    answer = _ANSWER.get()
    return error if answer is None or answer.begun else of_request(error)


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


def unbegun() -> int:
    """How many open requests the engine does not have yet. Whoever drains the engine waits for them too."""
    return sum(not answer.begun for answer in _open)


class Answers:
    """ASGI application around vLLM's. It delays the head of an answer until the first body chunk: then the first token
    exists, and the head names the version that computed it. `version` returns the served one, which only changes while
    the core is paused.

    A stream that raises is answered with the error's status, or ends with vLLM's error event once its head is out;
    vLLM itself writes that event for chat and completions alone.
    """

    def __init__(self, app: Any, version: Callable[[], str]):
        self.app, self._version = app, version

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = Answer()
        _ANSWER.set(answer)
        _open.add(answer)
        head: list[Any] = []
        streams = False

        async def send_named(message: Any) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                head.append(message)
                return
            if head:
                start = head.pop()
                headers = [*start["headers"], (VERSION_HEADER, self._version().encode())]
                await send({**start, "headers": headers})
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except Exception as error:
            if not streams:
                raise
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # starlette wraps it
            fault = create_error_response(fault_of(cause))
            if fault.error.code >= 500:
                log.error("a stream failed", exc_info=cause)
            if head:
                await JSONResponse(fault.model_dump(), fault.error.code)(scope, receive, send)
            else:
                event = f"data: {json.dumps(fault.model_dump())}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            _open.discard(answer)
            answer.adapter = None  # contexts of vLLM's tasks may keep the answer
