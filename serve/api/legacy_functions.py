"""Answers chat requests with OpenAI's older `functions` and `function_call` in the older form.

The gateway has added the newer form, which vLLM reads; `functions` are still in the request (weights.format.
legacy_functions has both directions).
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
    OpenAIServingChat.create_chat_completion = _in_older_form(OpenAIServingChat.create_chat_completion)


def _in_older_form(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def run(self: OpenAIServingChat, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        found = await answer(self, request, raw_request)
        if not legacy.is_legacy(request.model_extra or {}):
            return found
        if isinstance(found, ChatCompletionResponse):
            return LegacyResponse.model_construct(_fields_set=found.model_fields_set, **vars(found))
        return legacy_stream(found) if hasattr(found, "__aiter__") else found

    return run


class LegacyResponse(ChatCompletionResponse):
    """Says `function_call` where a ChatCompletionResponse says `tool_calls`."""

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
