"""Gives answers the shapes of the APIs they speak, where vLLM 0.32 differs.

Anthropic's messages: ids begin with `msg_`; a conversation that ends with the assistant's own text is continued from
there; a call whose arguments are not JSON, because a limit cut them, has an empty `input`. OpenAI's chat: a request
with the older `functions` is answered with `function_call` (the gateway has added the newer `tools`, which vLLM reads);
a budget for thinking asks nothing of a model without reasoning, because clients set it for every model.

A stream that fails ends with vLLM's error object in every API, which the gateway turns into the event of the API that
the client speaks. vLLM itself writes it for chat and completions alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, _is_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.logger import init_logger

from weights.format import legacy_functions as legacy

_DATA = "data: "
_ERROR = f'{_DATA}{{"error"'

log = init_logger("vllm.appliance.answer_shapes")


def apply() -> None:
    """Call once per process, before vLLM makes its routes."""
    # Removed by: vLLM's own answers to `functions`, and a budget that models without reasoning ignore.
    OpenAIServingChat.create_chat_completion = _chat(OpenAIServingChat.create_chat_completion)
    # Removed by: ids of Anthropic's form in vLLM.
    anthropic.AnthropicMessagesResponse.model_post_init = _own_id
    served = AnthropicServingMessages
    # Removed by: prefilled answers in vLLM's Anthropic API.
    served._build_base_request = classmethod(_continues(vars(served)["_build_base_request"].__func__))
    # Removed by: a converter in vLLM that reads cut arguments.
    served.messages_full_converter = _closes_cut_calls(served.messages_full_converter)
    # Removed by: vllm#46162, for vllm#46028, with the status of the error.
    served.message_stream_converter = _passes_errors(served.message_stream_converter)
    # Removed by: error events in vLLM's Responses streams.
    response_routes._convert_stream_to_sse_events = _ends_with_errors(response_routes._convert_stream_to_sse_events)


def _chat(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def run(self: OpenAIServingChat, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        if not self._include_reasoning_tokens_details:  # it has no parser of thoughts
            request.thinking_token_budget = None
        result = await answer(self, request, raw_request)
        if not legacy.is_legacy(request.model_extra or {}):
            return result
        if isinstance(result, ChatCompletionResponse):
            return LegacyResponse.model_construct(_fields_set=result.model_fields_set, **vars(result))
        return legacy_stream(result) if hasattr(result, "__aiter__") else result

    return run


class LegacyResponse(ChatCompletionResponse):
    """Has `function_call` where a ChatCompletionResponse has `tool_calls`."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        body = super().model_dump(**options)
        for choice in body["choices"]:
            choice["message"] = legacy.answer_message(choice["message"])
            choice["finish_reason"] = legacy.finish_reason(choice["finish_reason"])
        return body


async def legacy_stream(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Server-sent events of vLLM's chat stream, in the older form. Each is `data: JSON` or `data: [DONE]`."""
    async for event in events:
        if "tool_calls" in event and event.startswith(_DATA):
            chunk = json.loads(event[len(_DATA) :])
            for choice in chunk.get("choices", ()):
                choice["delta"] = legacy.answer_delta(choice["delta"])
                choice["finish_reason"] = legacy.finish_reason(choice.get("finish_reason"))
            event = f"{_DATA}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
        yield event


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


def _closes_cut_calls(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def run(self: AnthropicServingMessages, answer: Any) -> Any:
        for call in answer.choices[0].message.tool_calls:
            if not _is_json(call.function.arguments):
                call.function.arguments = "{}"
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
            yield f"{_DATA}{json.dumps(create_error_response(error).model_dump())}\n\n"

    return run
