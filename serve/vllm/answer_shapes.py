"""Answers have the shapes of the APIs they speak, where vLLM 0.32 differs: Anthropic's messages and OpenAI's responses.

Anthropic's (https://docs.anthropic.com/en/api/messages): ids begin with `msg_`, those of calls with `toolu_`; a
conversation that ends with the assistant's own text is continued from there; `thinking` asks nothing of a model that
vLLM sees no reasoning of, as clients set it for every model; an error in a stream is vLLM's own error object, which the
gateway turns into Anthropic's. OpenAI's: a stream of /v1/responses that `max_output_tokens` cut off ends with
`response.incomplete`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses import serving as responses

_CHAT_ID = "chatcmpl-"
_MESSAGE_ID = "msg_"
_ERROR = 'data: {"error"'
_CALL_ID, _TOOL_USE_ID = "chatcmpl-tool-", "toolu_"
# Inside a JSON text a quote is escaped, so this is never what a model wrote.
_STREAMED_CALL_ID, _STREAMED_TOOL_USE_ID = f'"id":"{_CALL_ID}', f'"id":"{_TOOL_USE_ID}'


class ResponseIncompleteEvent(responses.ResponseCompletedEvent):
    type: Literal["response.incomplete"]  # type: ignore[assignment]


def apply() -> None:
    """Call once per process, before vLLM makes its routes."""
    anthropic.AnthropicMessagesResponse.model_post_init = _own_id
    served = AnthropicServingMessages
    served._build_base_request = classmethod(_continues(vars(served)["_build_base_request"].__func__))
    served.create_messages = _without_thinking(served.create_messages)
    served.count_tokens = _without_thinking(served.count_tokens)
    served.message_stream_converter = _passes_errors(served.message_stream_converter)
    responses.ResponseCompletedEvent = _completed_or_not(responses.ResponseCompletedEvent)


def _own_id(message: anthropic.AnthropicMessagesResponse, context: Any) -> None:
    message.id = _MESSAGE_ID + message.id.removeprefix(_CHAT_ID).removeprefix("req_")
    for block in message.content:
        if block.type == "tool_use" and block.id is not None and block.id.startswith(_CALL_ID):
            block.id = _TOOL_USE_ID + block.id.removeprefix(_CALL_ID)


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
                # Before vLLM reads them: it tells by the id which call a piece belongs to.
                yield chunk.replace(_STREAMED_CALL_ID, _STREAMED_TOOL_USE_ID)

        async for event in convert(self, until_error()):
            yield event
        for error in failed:
            yield error

    return run


def _completed_or_not(completed: type[Any]) -> Callable[..., Any]:
    @functools.wraps(completed, updated=())
    def make(*, type: str, response: Any, **more: Any) -> Any:
        if response.status == "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=response, **more)
        return completed(type=type, response=response, **more)

    return make
