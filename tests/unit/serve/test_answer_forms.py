"""Answers in the forms of other APIs, made of vLLM's own objects without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)

from serve.api import answer_shapes

F = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def chunk(delta: dict, finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    made = ChatCompletionStreamResponse(id="chatcmpl-1", model="m", choices=[choice])
    return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"


CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"tool_calls": [{"index": 0, **CALL, "function": {"name": "f", "arguments": ""}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
    chunk({"content": ""}, "tool_calls"),
    "data: [DONE]\n\n",
]


PLAIN = SimpleNamespace(_include_reasoning_tokens_details=False)


async def stream(events):
    for event in events:
        yield event


async def test_an_answer_has_the_form_of_its_request():
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    whole = ChatCompletionResponse(model="m", choices=[choice], usage={})

    async def answer(self, request, raw_request):
        return whole

    tools = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": F}],
    }
    answers = answer_shapes._chat(answer)
    told = await answers(PLAIN, ChatCompletionRequest.model_validate({**tools, "functions": [F]}))
    (said,) = told.model_dump()["choices"]
    assert said["message"]["function_call"] == CALL["function"] and "tool_calls" not in said["message"]
    assert said["finish_reason"] == "function_call"
    assert await answers(PLAIN, ChatCompletionRequest.model_validate(tools)) is whole


async def test_a_stream_of_the_older_kind():
    events = [event async for event in answer_shapes.legacy_stream(stream(CHUNKS))]
    assert events[-1] == "data: [DONE]\n\n" and not any("tool_calls" in event for event in events)
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
    pieces = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == '{"a":1}'
    assert choices[-1]["finish_reason"] == "function_call"


@pytest.fixture
def shaped(monkeypatch):
    """vLLM's classes with our shapes, put back afterwards."""
    monkeypatch.setattr(AnthropicMessagesResponse, "model_post_init", answer_shapes._own_id)
    convert = answer_shapes._passes_errors(AnthropicServingMessages.message_stream_converter)
    return lambda chunks: convert(SimpleNamespace(), stream(chunks))


async def test_a_stream_of_anthropics_form_ends_with_the_engines_error(shaped):
    error = 'data: {"error": {"message": "x", "code": 500}}\n\n'
    events = [event async for event in shaped([*CHUNKS[:3], error])]
    assert events[-1] == error and not any(event.startswith("event: error") for event in events)


@pytest.mark.parametrize(("parser", "budget"), [(False, None), (True, 9)])
async def test_budget_for_thinking_is_for_models_that_reason(parser, budget):
    async def answer(self, request, raw_request):
        return request.thinking_token_budget

    request = ChatCompletionRequest(messages=[], thinking_token_budget=9)
    answers = answer_shapes._chat(answer)
    assert await answers(SimpleNamespace(_include_reasoning_tokens_details=parser), request) == budget


def test_id_of_a_whole_answer(monkeypatch):
    monkeypatch.setattr(AnthropicMessagesResponse, "model_post_init", answer_shapes._own_id)
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    answer = ChatCompletionResponse(id="chatcmpl-9", model="m", choices=[choice], usage={})
    told = AnthropicServingMessages.messages_full_converter(SimpleNamespace(), answer)
    assert (told.id, told.stop_reason) == ("msg_9", "tool_use")


@pytest.mark.parametrize(("cut", "read"), [('{"a": 1, "city": "Par', {}), ("", {}), ('{"a": 1}', {"a": 1})])
def test_cut_call_of_anthropics_form_has_an_empty_input(cut, read):
    call = {**CALL, "function": {"name": "f", "arguments": cut}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "length"}
    convert = answer_shapes._closes_cut_calls(AnthropicServingMessages.messages_full_converter)
    made = convert(SimpleNamespace(), ChatCompletionResponse(id="chatcmpl-9", model="m", choices=[choice], usage={}))
    assert (made.stop_reason, made.content[0].input) == ("max_tokens", read)
