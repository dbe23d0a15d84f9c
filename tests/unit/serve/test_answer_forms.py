"""Answers in the forms of other APIs, made of vLLM's own objects without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.renderers import chat_utils

from serve.api import answer_shapes
from serve.api.legacy_functions import LegacyResponse, _both_forms, legacy_stream, newer

F = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
OLDER = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "42"},
    ],
    "functions": [F],
    "function_call": {"name": "f"},
}


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


async def stream(events):
    for event in events:
        yield event


def test_a_request_of_the_older_kind_becomes_the_newer_one():
    asked = newer(ChatCompletionRequest.model_validate({**OLDER, "max_tokens": 5}))
    assert [tool.function.name for tool in asked.tools] == ["f"] and asked.tool_choice.function.name == "f"
    assert asked.parallel_tool_calls is False and asked.max_completion_tokens in (5, None)
    assert not asked.model_extra, "vLLM warns of fields that it does not know"
    call, result = asked.messages[1:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and result["role"] == "tool"


async def test_an_answer_has_the_form_of_its_request():
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    whole = ChatCompletionResponse(model="m", choices=[choice], usage={})
    seen = []

    async def answer(self, request, raw_request):
        seen.append(request)
        return whole

    serving = SimpleNamespace(create_error_response=lambda text, param: (text, param))
    answers = _both_forms(answer)
    told = await answers(serving, ChatCompletionRequest.model_validate(OLDER))
    assert isinstance(told, LegacyResponse)
    (said,) = told.model_dump()["choices"]
    assert said["message"]["function_call"] == CALL["function"] and "tool_calls" not in said["message"]
    assert said["finish_reason"] == "function_call"
    tools = {"model": "m", "messages": OLDER["messages"], "tools": [{"type": "function", "function": F}]}
    assert await answers(serving, ChatCompletionRequest.model_validate(tools)) is whole, "only its messages are older"
    assert seen[-1].messages[1]["tool_calls"]
    wrong = ChatCompletionRequest.model_validate({**OLDER, "function_call": {"name": "g"}})
    text, param = await answers(serving, wrong)
    assert "'g'" in text and param == "function_call" and len(seen) == 2


async def test_a_stream_of_the_older_kind():
    events = [event async for event in legacy_stream(stream(CHUNKS))]
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


async def test_calls_of_anthropics_form_have_ids_of_its_own(shaped):
    events = "".join([event async for event in shaped(CHUNKS)])
    assert '"id":"toolu_1"' in events and '"id":"call_' not in events
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    written = "".join(piece["delta"]["partial_json"] for piece in pieces if "partial_json" in piece.get("delta", {}))
    assert written == '{"a":1}', "vLLM finds a piece's call by the id"
    quoted = chunk({"content": 'say "id":"call_1'})
    assert "call_1" in "".join([event async for event in shaped([CHUNKS[0], quoted])]), "what a model wrote"


def test_beside_a_call_that_says_nothing_the_content_is_null():
    create = answer_shapes._null_beside_calls(lambda **fields: ChatMessage(role="assistant", **fields))
    for content, calls, told in (("", [CALL], None), ("x", [CALL], "x"), ("", [], "")):
        assert create(content=content, tool_calls=calls).model_dump()["content"] == told


@pytest.mark.parametrize(
    ("choice", "told"),
    [("required", None), ({"type": "function", "function": {"name": "f"}}, None), ("auto", ""), (None, "")],
)
async def test_so_it_is_in_a_stream_in_which_a_call_was_demanded(choice, told):
    tools = [{"type": "function", "function": F}]
    body = {"model": "m", "messages": OLDER["messages"][:1], "tools": tools, "tool_choice": choice}
    request = ChatCompletionRequest.model_validate(body)
    written = chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"content":""}'}}]})
    convert = answer_shapes._streams_null_beside_calls(lambda self, request: stream([*CHUNKS, written]))
    events = [event async for event in convert(None, request)]
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if "DONE" not in event]
    assert [delta["content"] for delta in deltas if "content" in delta] == [told, told]
    assert deltas[-1]["tool_calls"][0]["function"]["arguments"] == '{"content":""}', "what the model wrote"


def test_ids_of_calls_begin_as_openais_wherever_they_are_made():
    seen = chat_utils.make_tool_call_id
    kept = seen.__code__
    try:
        answer_shapes.name_calls()
        assert seen().startswith("call_") and ToolCall(function={"name": "f", "arguments": ""}).id.startswith("call_")
        assert seen(id_type="kimi_k2", func_name="f", idx=1) == "functions.f:1", "which its template reads again"
    finally:
        seen.__code__ = kept


@pytest.mark.parametrize(("tools", "told"), [([], "auto"), ([F], "none")])
def test_an_answer_without_tools_has_openais_default_for_their_choice(tools, told):
    asked = SimpleNamespace(background=None, truncation=None, tools=tools, tool_choice="none")
    answer_shapes._with_defaults(lambda cls, request: request)(None, asked)
    assert (asked.tool_choice, asked.background, asked.truncation) == (told, False, "disabled")


def test_ids_of_a_whole_answer(monkeypatch):
    monkeypatch.setattr(AnthropicMessagesResponse, "model_post_init", answer_shapes._own_id)
    convert = answer_shapes._own_call_ids(AnthropicServingMessages.messages_full_converter)
    calls = [CALL, {**CALL, "id": "functions.f:1"}]
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": calls}, "finish_reason": "tool_calls"}
    told = convert(SimpleNamespace(), ChatCompletionResponse(id="chatcmpl-9", model="m", choices=[choice], usage={}))
    assert (told.id, told.stop_reason) == ("msg_9", "tool_use")
    assert [block.id for block in told.content] == ["toolu_1", "functions.f:1"], "the last one is the model's own"
    assert [block.input for block in told.content] == [{"a": 1}, {"a": 1}]


@pytest.mark.parametrize(("cut", "told"), [('{"a": 1, "city": "Par', {"a": 1, "city": "Par"}), ("", {}), ("[", {})])
def test_a_cut_call_of_anthropics_form_has_what_was_written_of_its_input(cut, told):
    call = {**CALL, "function": {"name": "f", "arguments": cut}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "length"}
    convert = answer_shapes._own_call_ids(AnthropicServingMessages.messages_full_converter)
    made = convert(SimpleNamespace(), ChatCompletionResponse(id="chatcmpl-9", model="m", choices=[choice], usage={}))
    assert (made.stop_reason, made.content[0].input) == ("max_tokens", told)
