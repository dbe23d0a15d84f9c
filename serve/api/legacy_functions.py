"""Answers chat requests with OpenAI's older `functions` and `function_call` in the same form.

vLLM 0.32 reads only `tools` and silently ignores the older names. A request is converted to the newer form before it is
rendered, and its answer back to the older one, whole or as a stream (weights.format.legacy_functions).
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from weights.format import legacy_functions as legacy

_DATA = "data: "


def apply() -> None:
    OpenAIServingChat.create_chat_completion = _both_forms(OpenAIServingChat.create_chat_completion)


def _both_forms(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def run(self: OpenAIServingChat, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        older = legacy.is_legacy(request.model_extra or {})
        if not older and not any(map(legacy.has_call, request.messages)):
            return await answer(self, request, raw_request)
        try:
            request = newer(request)
        except ValueError as error:
            return self.create_error_response(str(error), param=getattr(error, "param", None))
        found = await answer(self, request, raw_request)
        if not older:
            return found
        if isinstance(found, ChatCompletionResponse):
            return LegacyResponse.of(found)
        return legacy_stream(found) if hasattr(found, "__aiter__") else found

    return run


def newer(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """The same request in the newer form. Raises ValueError."""
    body = request.model_dump(exclude_unset=True)
    extra = request.model_extra or {}
    if legacy.is_legacy(extra):
        # vLLM sets `tool_choice` itself; only what the client named counts.
        body |= legacy.as_tools({**extra, "tools": request.tools})
    body["messages"] = [
        legacy.with_tool_call(index, message) if legacy.has_call(message) else message
        for index, message in enumerate(request.messages)
    ]
    for name in ("functions", "function_call"):
        body.pop(name, None)
    return ChatCompletionRequest.model_validate(body)


class LegacyResponse(ChatCompletionResponse):
    """Says `function_call` where a ChatCompletionResponse says `tool_calls`."""

    @classmethod
    def of(cls, response: ChatCompletionResponse) -> LegacyResponse:
        return cls.model_construct(_fields_set=response.model_fields_set, **vars(response))

    def model_dump(self, **options: Any) -> dict[str, Any]:
        body = super().model_dump(**options)
        for choice in body["choices"]:
            choice["message"] = legacy.answer_message(choice["message"])
            choice["finish_reason"] = legacy.finish_reason(choice["finish_reason"])
        return body


async def legacy_stream(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Server-sent events of vLLM's chat stream, in the older form. Each is `data: JSON` or `data: [DONE]`."""
    async for event in events:
        if "tool_calls" not in event or not event.startswith(_DATA):
            yield event
            continue
        chunk = json.loads(event[len(_DATA) :])
        for choice in chunk.get("choices", ()):
            choice["delta"] = legacy.answer_delta(choice["delta"])
            if "finish_reason" in choice:
                choice["finish_reason"] = legacy.finish_reason(choice["finish_reason"])
        yield f"{_DATA}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
