"""Requests and responses in other APIs' formats, built from vLLM's own objects without an engine."""

import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from serve.core.legacy_functions import LegacyRefused, as_tools, with_tool_call
from serve.vllm import answers

F = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, "auto"),
        ({"function_call": "none"}, "none"),
        ({"function_call": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_as_tools_converts_function_call_choice(given, choice):
    assert as_tools({"functions": [F]} | given) == {
        "tools": [{"type": "function", "function": F}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }


def test_with_tool_call_links_result_to_call():
    call = with_tool_call(1, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})
    result = with_tool_call(2, {"role": "function", "name": "f", "content": "42"})
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert "function_call" not in call
    assert result == {"role": "tool", "name": "f", "content": "42", "tool_call_id": "call_1"}
    with pytest.raises(LegacyRefused, match="both"):
        with_tool_call(0, call | {"function_call": {"name": "f", "arguments": "{}"}})


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


async def stream(events):
    for event in events:
        yield event


async def test_chat_answers_legacy_functions_with_function_call(monkeypatch):
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    whole = ChatCompletionResponse(model="m", choices=[choice], usage={})

    async def answer(self, request, raw_request):
        return whole

    monkeypatch.setattr(OpenAIServingChat, "create_chat_completion", answer)
    chat = object.__new__(answers.Chat)
    tools = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": F}],
    }
    told = await chat.create_chat_completion(ChatCompletionRequest.model_validate({**tools, "functions": [F]}))
    (said,) = told.model_dump()["choices"]
    assert said["message"]["function_call"] == CALL["function"] and "tool_calls" not in said["message"]
    assert said["finish_reason"] == "function_call"
    assert await chat.create_chat_completion(ChatCompletionRequest.model_validate(tools)) is whole


async def test_legacy_stream_converts_tool_call_chunks():
    events = [event async for event in answers.legacy_stream(stream(CHUNKS))]
    assert events[-1] == "data: [DONE]\n\n" and not any("tool_calls" in event for event in events)
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
    pieces = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == '{"a":1}'
    assert choices[-1]["finish_reason"] == "function_call"


@pytest.fixture
def messages():
    return object.__new__(answers.Messages)


async def test_messages_stream_ends_with_engine_error(messages):
    error = 'data: {"error": {"message": "x", "code": 500}}\n\n'
    events = [event async for event in messages.message_stream_converter(stream([*CHUNKS[:3], error]))]
    assert events[-1] == error and not any(event.startswith("event: error") for event in events)
    assert json.loads(events[0].partition("data: ")[2])["message"]["id"] == "msg_1"


@pytest.mark.parametrize(("cut", "read"), [('{"a": 1, "city": "Par', {}), ("", {}), ('{"a": 1}', {"a": 1})])
def test_messages_truncated_call_has_empty_input(messages, cut, read):
    call = {**CALL, "function": {"name": "f", "arguments": cut}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "length"}
    answer = ChatCompletionResponse(id="chatcmpl-9", model="m", choices=[choice], usage={})
    made = messages.messages_full_converter(answer)
    assert (made.stop_reason, made.content[0].input) == ("max_tokens", read)


class App:
    """An application with one route, whose stream fails after `events`."""

    def __init__(self, events, error):
        async def fails():
            for event in events:
                yield event
            raise error

        self.app = FastAPI()
        self.app.get("/")(lambda: StreamingResponse(fails(), media_type="text/event-stream"))

    async def get(self):
        transport = httpx.ASGITransport(answers.Answers(self.app, lambda: "v2"))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.get("/")


async def test_answers_stream_failing_before_head_gets_status():
    response = await App([], KeyError("x")).get()
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400)


async def test_answers_stream_failing_later_ends_with_error_event():
    response = await App(["data: 1\n\n"], RuntimeError("x")).get()
    assert response.status_code == 200 and response.headers["x-appliance-model-version"] == "v2"
    first, last = response.text.strip().split("\n\n")
    assert first == "data: 1" and json.loads(last.removeprefix("data: "))["error"]["code"] == 500


@pytest.mark.parametrize(("error", "status"), [(KeyError("x"), 400), (OSError("disk"), 500)])
async def test_application_answers_read_errors_with_400(error, status):
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)

    @app.get("/")
    async def fails():
        raise error

    app.middleware_stack = app.build_middleware_stack()  # as vLLM builds one
    init_exception_handler(app)
    answers.set_up(app)
    transport = httpx.ASGITransport(answers.Answers(app, lambda: "v1"), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        assert (await client.get("/")).status_code == status
