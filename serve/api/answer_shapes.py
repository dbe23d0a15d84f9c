"""Gives answers and requests the shapes of the APIs they speak, where vLLM 0.32 differs.

Anthropic's messages: ids begin with `msg_`; a conversation that ends with the assistant's own text is continued from
there; `thinking` asks nothing of a model that vLLM sees no reasoning of, as clients set it for every model; the `input`
of a call that a limit cut has what was written of it. OpenAI's responses: a stream that `max_output_tokens` cut ends
with `response.incomplete`. OpenAI's chat: content beside calls is null where the model wrote none; several greedy
answers are allowed; a call that the client demands ("required", or a function by name) has arguments of its schema:
vLLM enforces that for `strict` tools alone, and a small model that had to call `get_weather(city)` wrote schemas.

A stream that fails ends with vLLM's error object in every API, which the gateway turns into the event of the API that
the client speaks. vLLM itself writes it for chat and completions alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from pydantic_core import from_json
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.entrypoints.openai.responses import serving as responses
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.logger import init_logger
from vllm.parser import abstract_parser
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

_ERROR = 'data: {"error"'
_NO_ARGUMENTS = ("", "null")

log = init_logger("vllm.appliance.answer_shapes")


class ResponseIncompleteEvent(responses.ResponseCompletedEvent):
    type: Literal["response.incomplete"]  # type: ignore[assignment]


def apply() -> None:
    """Call once per process, before vLLM makes its routes."""
    SamplingParams._verify_greedy_sampling = lambda self: None
    resolve = _enforces_demanded_calls(structural_tag_registry.resolve_tool_strictness)
    structural_tag_registry.resolve_tool_strictness = abstract_parser.resolve_tool_strictness = resolve
    OpenAIServingChat._create_chat_message = _null_beside_calls(OpenAIServingChat._create_chat_message)
    anthropic.AnthropicMessagesResponse.model_post_init = _own_id
    served = AnthropicServingMessages
    served._build_base_request = classmethod(_continues(vars(served)["_build_base_request"].__func__))
    served.create_messages = _without_thinking(served.create_messages)
    served.count_tokens = _without_thinking(served.count_tokens)
    served.messages_full_converter = _closes_cut_calls(served.messages_full_converter)
    served.message_stream_converter = _passes_errors(served.message_stream_converter)
    responses.ResponseCompletedEvent = _completed_or_not(responses.ResponseCompletedEvent)
    response_routes._convert_stream_to_sse_events = _ends_with_errors(response_routes._convert_stream_to_sse_events)


def _enforces_demanded_calls(resolve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resolve)
    def run(tools: Any, tool_choice: Any, strict_level: ToolStrictLevel) -> Any:
        demanded = tool_choice not in ("auto", "none", None)
        return resolve(tools, tool_choice, ToolStrictLevel.PARAMETER if demanded else strict_level)

    return run


def _null_beside_calls(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def run(*args: Any, **kwargs: Any) -> Any:
        message = create(*args, **kwargs)
        if message.tool_calls and message.content == "":
            message.content = None
        for call in message.tool_calls or ():
            if call.function.arguments.strip() in _NO_ARGUMENTS:  # clients read an object
                call.function.arguments = "{}"
        return message

    return run


def _own_id(message: anthropic.AnthropicMessagesResponse, context: Any) -> None:
    message.id = "msg_" + message.id.removeprefix("chatcmpl-").removeprefix("req_")


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


def _closes_cut_calls(convert: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's converter fails at arguments that a limit cut."""

    @functools.wraps(convert)
    def run(self: AnthropicServingMessages, answer: Any) -> Any:
        choice = answer.choices[0]
        for call in choice.message.tool_calls if choice.finish_reason == "length" else ():
            try:
                read = from_json(call.function.arguments, allow_partial="trailing-strings")
            except ValueError:
                read = None
            call.function.arguments = json.dumps(read if isinstance(read, dict) else {})
        return convert(self, answer)

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
                yield chunk

        async for event in convert(self, until_error()):
            yield event
        for error in failed:
            yield error

    return run


def _ends_with_errors(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    async def run(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        try:
            async for event in convert(events):
                yield event
        except Exception as error:  # noqa: BLE001 - carried to the client
            log.exception("Error in responses stream.")
            yield f"data: {json.dumps(create_error_response(error).model_dump())}\n\n"

    return run


def _completed_or_not(completed: type[Any]) -> Callable[..., Any]:
    @functools.wraps(completed, updated=())
    def make(*, type: str, response: Any, **more: Any) -> Any:
        if response.status == "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=response, **more)
        return completed(type=type, response=response, **more)

    return make
