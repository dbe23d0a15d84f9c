"""Answers have the shapes of the APIs they speak, where vLLM 0.32 differs: Anthropic's messages, OpenAI's responses and
calls of tools in OpenAI's chat.

Anthropic's (https://docs.anthropic.com/en/api/messages): ids begin with `msg_`, those of calls with `toolu_`; a
conversation that ends with the assistant's own text is continued from there; `thinking` asks nothing of a model that
vLLM sees no reasoning of, as clients set it for every model; the `input` of a call that is cut has what was written of
it. OpenAI's: a stream of /v1/responses that
`max_output_tokens` cut off ends with `response.incomplete`; null is OpenAI's default for `background` and `truncation`,
where vLLM fails once the answer is complete; ids of calls begin with `call_`; `tool_choice` of an answer without tools
is OpenAI's default "auto", where vLLM writes "none". In chat, the `content` beside a call that the client demanded
(`tool_choice` "required" or a tool's name) is null, in a stream too, where vLLM writes an empty text.

A stream that fails ends with vLLM's error object in every API, which the gateway turns into the event of the API that
the client speaks. vLLM itself writes it for chat and completions alone: under /v1/messages it is an event of a type
that Anthropic does not have, and a stream of /v1/responses breaks off.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any, Literal

from pydantic_core import from_json
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.entrypoints.openai.responses import serving as responses
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.logger import init_logger
from vllm.renderers import chat_utils

_CHAT_ID = "chatcmpl-"
_MESSAGE_ID = "msg_"
_ERROR = 'data: {"error"'
_CALL_ID, _TOOL_USE_ID = "call_", "toolu_"
# Inside a JSON text a quote is escaped, so this is never what a model wrote.
_STREAMED_CALL_ID, _STREAMED_TOOL_USE_ID = f'"id":"{_CALL_ID}', f'"id":"{_TOOL_USE_ID}'
_EMPTY_TEXT, _NO_TEXT = '"content":""', '"content":null'
_OTHER_ERROR = "event: error\n"

log = init_logger("vllm.appliance.answer_shapes")


class ResponseIncompleteEvent(responses.ResponseCompletedEvent):
    type: Literal["response.incomplete"]  # type: ignore[assignment]


def apply() -> None:
    """Call once per process, before vLLM makes its routes."""
    name_calls()
    chat = OpenAIServingChat
    chat._create_chat_message = _null_beside_calls(chat._create_chat_message)
    chat.chat_completion_stream_generator = _streams_null_beside_calls(chat.chat_completion_stream_generator)
    anthropic.AnthropicMessagesResponse.model_post_init = _own_id
    served = AnthropicServingMessages
    served._build_base_request = classmethod(_continues(vars(served)["_build_base_request"].__func__))
    served.create_messages = _without_thinking(served.create_messages)
    served.count_tokens = _without_thinking(served.count_tokens)
    served.messages_full_converter = _own_call_ids(served.messages_full_converter)
    served.message_stream_converter = _passes_errors(served.message_stream_converter)
    responses.ResponseCompletedEvent = _completed_or_not(responses.ResponseCompletedEvent)
    response_routes._convert_stream_to_sse_events = _ends_with_errors(response_routes._convert_stream_to_sse_events)
    made = responses.ResponsesResponse
    made.from_request = classmethod(_with_defaults(vars(made)["from_request"].__func__))


def name_calls() -> None:
    """Its code, not its name: some fifty parsers and a field's default have the function itself."""
    chat_utils.make_tool_call_id.__code__ = _call_id.__code__


def _call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """Runs with the names of vLLM's module."""
    if id_type == "kimi_k2":
        return f"functions.{func_name}:{idx}"
    return f"call_{random_uuid()}"  # type: ignore[name-defined]  # noqa: F821


def _null_beside_calls(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def run(*args: Any, **kwargs: Any) -> Any:
        message = create(*args, **kwargs)
        if message.tool_calls and message.content == "":
            message.content = None
        return message

    return run


def _streams_null_beside_calls(generate: Callable[..., Any]) -> Callable[..., Any]:
    """For a stream in which a call was demanded. Whether any other stream calls a tool is not known when it begins."""

    @functools.wraps(generate)
    async def run(self: OpenAIServingChat, request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        demanded = bool(request.tools) and request.tool_choice not in (None, "none", "auto")
        async for event in generate(self, request, *args, **kwargs):
            yield event.replace(_EMPTY_TEXT, _NO_TEXT) if demanded else event

    return run


def _own_id(message: anthropic.AnthropicMessagesResponse, context: Any) -> None:
    message.id = _MESSAGE_ID + message.id.removeprefix(_CHAT_ID).removeprefix("req_")


def _own_call_ids(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def run(self: AnthropicServingMessages, answer: Any) -> Any:
        for call in answer.choices[0].message.tool_calls:
            if call.id.startswith(_CALL_ID):  # otherwise it is the model's own, which its template reads again
                call.id = _TOOL_USE_ID + call.id.removeprefix(_CALL_ID)
            if answer.choices[0].finish_reason == "length":
                call.function.arguments = _as_far_as_they_go(call.function.arguments)
        return convert(self, answer)

    return run


def _as_far_as_they_go(arguments: str) -> str:
    """Closes a cut object: vLLM reads it for the `input`, and its converter fails at one that a limit cut."""
    try:
        read = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        read = None
    return json.dumps(read if isinstance(read, dict) else {})


def _continues(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def run(cls: Any, asked: Any, messages: list[dict[str, Any]]) -> Any:
        request = build(cls, asked, messages)
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
            request.add_generation_prompt = False
            request.continue_final_message = True
        return request

    return run


def _without_thinking(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def run(self: AnthropicServingMessages, request: Any, raw_request: Any = None) -> Any:
        if request.thinking is not None and not self._include_reasoning_tokens_details:
            request.thinking = None
        return await answer(self, request, raw_request)

    return run


def _passes_errors(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    async def run(self: AnthropicServingMessages, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        failed: list[str] = []

        async def until_error() -> AsyncGenerator[str, None]:
            async for chunk in chunks:
                if chunk.startswith(_ERROR):
                    failed.append(chunk)
                    return
                # This happens before vLLM reads them: it matches pieces to calls by their ids.
                yield chunk.replace(_STREAMED_CALL_ID, _STREAMED_TOOL_USE_ID)

        async for event in convert(self, until_error()):
            yield _error_event(_message(event)) if event.startswith(_OTHER_ERROR) else event
        for error in failed:
            yield error

    return run


def _message(event: str) -> str:
    """That of an error event under /v1/messages."""
    return str(json.loads(event.split("data: ", 1)[1])["error"]["message"])


def _error_event(error: str | Exception) -> str:
    if isinstance(error, str):
        made = error_response.create_error_response(error, "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
    else:
        made = error_response.create_error_response(error)
    return f"data: {json.dumps(made.model_dump())}\n\n"


def _ends_with_errors(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    async def run(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        try:
            async for event in convert(events):
                yield event
        except Exception as error:  # noqa: BLE001 - carried to the client
            log.exception("Error in responses stream.")
            yield _error_event(error)

    return run


def _completed_or_not(completed: type[Any]) -> Callable[..., Any]:
    @functools.wraps(completed, updated=())
    def make(*, type: str, response: Any, **more: Any) -> Any:
        if response.status == "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=response, **more)
        return completed(type=type, response=response, **more)

    return make


def _with_defaults(made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(made)
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        request.background = bool(request.background)
        request.truncation = request.truncation or "disabled"
        if not request.tools:
            request.tool_choice = "auto"
        return made(cls, request, *args, **kwargs)

    return from_request
