"""Adapts vLLM 0.32's responses to clients of OpenAI's and Anthropic's APIs.

`Answers` wraps vLLM's application, adds the version to each response and counts requests that have not reached the
core. The classes after `Answers` replace vLLM's handlers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, _is_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.pooling.embed import protocol as embeddings
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest

from runtime.errors import words_of_check
from serve.core import legacy_functions as legacy

# The gateway reads this header (appliance/gateway/server/inference.py): its table can lag behind the engine.
VERSION_HEADER = b"x-appliance-model-version"
# vLLM raises these errors, and would answer 500, for a request value that one of its steps does not expect.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, UnicodeError)
KINDS = (ValueError, NotImplementedError, *_UNREADABLE)
# Suffixes of pydantic's error types for a wrong type; a union's other errors are more specific, so they win.
_OTHER_TYPE = ("_type", "literal_error", "union_tag_invalid")
# Parts of a pydantic location that are not field names: types, and tags of vLLM's unions.
_FIELD = re.compile(r"[a-z0-9_]+")
_NO_FIELDS = frozenset("body str int float bool list dict enabled disabled adaptive tool_definition".split())
UNREADABLE = (
    "A value in this request has an unexpected type or shape: compare messages, tools and formats with the "
    "documentation of this route."
)

# vLLM validates a request against five models and creates an error for every token that is not a message: 100,000
# tokens block the event loop for 4 s.
EmbeddingBody = Annotated[  # type: ignore[valid-type]
    Annotated[get_args(embeddings.EmbeddingRequest)[0], Field(union_mode="left_to_right")],
    BeforeValidator(embeddings.reject_removed_pooling_parameters),
]
_DATA = "data: "
_ERROR = f'{_DATA}{{"error"'

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Answer:
    """State of one HTTP response. begun: the core has its request. adapter: its resolved adapter until then."""

    begun: bool = False
    adapter: LoRARequest | None = None


_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_open: set[Answer] = set()


def current() -> Answer | None:
    """Return the response that the calling task works on."""
    return _ANSWER.get()


def begin() -> None:
    """Note that the core has the request of the calling task."""
    if (answer := _ANSWER.get()) is not None:
        answer.begun, answer.adapter = True, None


def fault_of(error: Exception) -> Exception:
    """Return the error to respond with: before the core has the request, most errors are the request's fault."""
    answer = _ANSWER.get()
    return error if answer is None or answer.begun else of_request(error)


def of_request(error: Exception) -> Exception:
    """Return the error to send to the client for an exception raised while the request was read."""
    if isinstance(error, ValidationError | RequestValidationError):
        faults = error.errors()
        fault = next((candidate for candidate in faults if not candidate["type"].endswith(_OTHER_TYPE)), faults[0])
        # body, messages, 0, ChatCompletionUserMessageParam, content, str: the parameter is messages[0].content.
        fields = [str(name) for name in fault["loc"] if _FIELD.fullmatch(str(name)) and name not in _NO_FIELDS]
        param = re.sub(r"\.([0-9]+)", r"[\1]", ".".join(fields))
        words = words_of_check(fault["msg"]).removesuffix(".")[:2000]
        # An error without a parameter comes from a check across fields, and its message names the fields.
        text = f"Invalid value for `{param}`: {words}." if param else f"{words}."
        return VLLMValidationError(text, parameter=param or None)
    if isinstance(error, VLLMError) or not isinstance(error, KINDS):
        return error
    return VLLMValidationError(UNREADABLE if isinstance(error, _UNREADABLE) else str(error))


def unbegun() -> int:
    """Return the number of open requests that have not reached the engine; a drain waits for these requests too."""
    return sum(not answer.begun for answer in _open)


class Answers:
    """ASGI application around vLLM's. It delays the response head until the first body chunk, so that the head names
    the version that computed the first token. `version` returns the served version, which only changes
    while the core is paused.

    If a stream raises before the head is sent, the response has the error's status; later it ends with vLLM's error
    event, which vLLM itself writes only for chat and completions.
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
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # wrapped by starlette
            fault = create_error_response(fault_of(cause))
            if fault.error.code >= 500:
                log.error("a response stream failed", exc_info=cause)
            if head:
                await JSONResponse(fault.model_dump(), fault.error.code)(scope, receive, send)
            else:
                event = f"data: {json.dumps(fault.model_dump())}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            _open.discard(answer)
            answer.adapter = None  # vLLM's tasks may keep the Answer alive in their contexts


class Chat(OpenAIServingChat):
    """Answers requests with the older `functions` in the older form; the gateway has added the newer `tools`."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        result = await super().create_chat_completion(request, raw_request)
        if not legacy.is_legacy(request.model_extra or {}):
            return result
        if isinstance(result, ChatCompletionResponse):
            return LegacyResponse.model_construct(_fields_set=result.model_fields_set, **vars(result))
        return legacy_stream(result) if hasattr(result, "__aiter__") else result


class LegacyResponse(ChatCompletionResponse):
    """A ChatCompletionResponse with `function_call` instead of `tool_calls`."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        body = super().model_dump(**options)
        for choice in body["choices"]:
            legacy.answer(choice)
        return body


async def legacy_stream(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Convert the server-sent events (`data: ...`) of vLLM's chat stream to the older form."""
    async for event in events:
        if "tool_calls" in event and event.startswith(_DATA):
            chunk = json.loads(event[len(_DATA) :])
            for choice in chunk.get("choices", ()):
                legacy.answer(choice)
            event = f"{_DATA}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
        yield event


class Messages(AnthropicServingMessages):
    """Answers Anthropic's message requests: ids begin with `msg_`; if a conversation ends with the assistant's text,
    the answer continues that text. A call whose arguments are truncated JSON gets an empty `input`. A failed stream
    ends with vLLM's error object, which the gateway converts to the client's event."""

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        try:
            return await super().create_messages(request, raw_request)
        except Exception as error:
            raise fault_of(error) from error

    async def count_tokens(self, request: Any, raw_request: Any = None) -> Any:
        try:
            return await super().count_tokens(request, raw_request)
        except Exception as error:
            raise fault_of(error) from error

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: list[dict[str, Any]]) -> Any:
        request = super()._build_base_request(anthropic_request, openai_messages)
        last = openai_messages[-1] if openai_messages else {}
        if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
            request.add_generation_prompt = False
            request.continue_final_message = True
        return request

    def messages_full_converter(self, generator: ChatCompletionResponse) -> Any:
        for call in generator.choices[0].message.tool_calls:
            if not _is_json(call.function.arguments):
                call.function.arguments = "{}"
        generator.id = "msg_" + generator.id.removeprefix("chatcmpl-")
        return super().messages_full_converter(generator)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        failed: list[str] = []

        async def until_error() -> AsyncGenerator[str, None]:
            async for chunk in generator:
                if chunk.startswith(_ERROR):
                    failed.append(chunk)
                    return
                yield chunk.replace('"id":"chatcmpl-', '"id":"msg_', 1)

        async for event in super().message_stream_converter(until_error()):
            yield event
        for error in failed:
            yield error


def set_up(app: Any) -> None:
    """Replace vLLM's handlers by our subclasses, because vLLM has no option for that. app: the result of vLLM's
    build_app, after init_app_state and before the first request."""
    for kind in (RequestValidationError, *KINDS):
        app.add_exception_handler(kind, _answer_fault)
    for name, own in (("openai_serving_chat", Chat), ("anthropic_serving_messages", Messages)):
        if (handler := getattr(app.state, name, None)) is not None:
            handler.__class__ = own
    if getattr(app.state, "serving_embedding", None) is not None:
        app.add_api_route("/v1/embeddings", _embed, methods=["POST"])
        app.router.routes.insert(0, app.router.routes.pop())
    app.middleware_stack = app.build_middleware_stack()  # vLLM built its own without these handlers


async def _answer_fault(request: Request, error: Exception) -> Any:
    return await exception_handler(request, fault_of(error))


async def _embed(request: EmbeddingBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    from vllm.entrypoints.pooling.embed.api_router import create_embedding

    return await create_embedding(request=request, raw_request=raw_request)
