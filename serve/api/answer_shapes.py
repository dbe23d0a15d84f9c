"""Gives answers the shapes of the APIs they speak, where vLLM 0.32 differs: subclasses of its handlers.

Anthropic's messages: ids begin with `msg_`; a conversation that ends with the assistant's own text is continued from
there; a call whose arguments are not JSON, because a limit cut them, has an empty `input`; a stream that fails ends
with vLLM's own error object, which the gateway turns into the event of the API that the client speaks. OpenAI's chat: a
request with the older `functions` is answered with `function_call` (the gateway has added the newer `tools`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, _is_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.pooling.embed import protocol as embeddings
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

from serve.api.answers import KINDS, fault_of
from weights.format import legacy_functions as legacy

# vLLM tries five models for each and writes an error for every token that is not a message: 4 s for 100,000 tokens, on
# the loop that answers every owner.
EmbeddingBody = Annotated[  # type: ignore[valid-type]
    Annotated[get_args(embeddings.EmbeddingRequest)[0], Field(union_mode="left_to_right")],
    BeforeValidator(embeddings.reject_removed_pooling_parameters),
]
_DATA = "data: "
_ERROR = f'{_DATA}{{"error"'


class Chat(OpenAIServingChat):
    """OpenAI's chat, with `functions`."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        result = await super().create_chat_completion(request, raw_request)
        if not legacy.is_legacy(request.model_extra or {}):
            return result
        if isinstance(result, ChatCompletionResponse):
            return LegacyResponse.model_construct(_fields_set=result.model_fields_set, **vars(result))
        return legacy_stream(result) if hasattr(result, "__aiter__") else result


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


class Messages(AnthropicServingMessages):
    """Anthropic's messages."""

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
    """Put our subclasses in the places of vLLM's handlers, for whose classes it has no option. app: of vLLM's
    build_app, after init_app_state and before it answers."""
    for kind in KINDS:
        app.add_exception_handler(kind, _answer_fault)
    for name, own in (("openai_serving_chat", Chat), ("anthropic_serving_messages", Messages)):
        if (handler := getattr(app.state, name, None)) is not None:
            handler.__class__ = own
    if getattr(app.state, "serving_embedding", None) is not None:
        app.add_api_route("/v1/embeddings", _embed, methods=["POST"])
        app.router.routes.insert(0, app.router.routes.pop())
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built one, without these handlers


async def _answer_fault(request: Request, error: Exception) -> Any:
    return await exception_handler(request, fault_of(error))


async def _embed(request: EmbeddingBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    from vllm.entrypoints.pooling.embed.api_router import create_embedding

    return await create_embedding(request=request, raw_request=raw_request)
