"""Chat completions with `store`: the copy that the controller gets is what the client got, streams too, and a request
without it is handled as ever."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Box, Start, chat
from .test_responses import Controller, stored
from .upstreams import answer_chat, chat_answer, chat_events, sends

URL = "/v1/chat/completions"
KEPT = {"store": True, "metadata": {"use": "test"}}


@pytest.fixture
async def front(start_box: Start) -> Box:
    box = await start_box(engine=answer_chat)
    await box.control(Controller())
    return box


async def test_an_answer_is_stored_with_what_it_was_asked_with_and_passes_unchanged(front: Box) -> None:
    response = await front.ask("POST", URL, chat(temperature=0.5, user="u", **KEPT))
    assert json.loads(response.body) == chat_answer()
    (copy,) = await stored(front)
    asked = {"messages": chat()["messages"], "temperature": 0.5, "user": "u", "metadata": {"use": "test"}}
    assert copy == {"key": "key_all", "previous": None, "input": asked, "response": chat_answer()}


@pytest.mark.parametrize("more", [{}, {"store": False}])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_say_store_is_not_stored(front: Box, stream: bool, more: dict[str, Any]) -> None:
    assert (await front.ask("POST", URL, chat(stream=stream, **more))).status == 200
    await front.ask("POST", URL, chat(**KEPT))
    assert len(await stored(front)) == 1 and not front.gateway.controller.delivering


def chunk(delta: dict[str, Any], index: int = 0, **choice: Any) -> dict[str, Any]:
    made = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [made]}


def call(arguments: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments, **more.pop("named", {})}, **more}]}


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"}),
    chunk({"content": 'a "usage":{} '}, logprobs={"content": [{"token": "a", "logprob": -0.5}]}),
    chunk({"content": "data: [DONE]\n\n"}, logprobs={"content": [{"token": "b", "logprob": -1.5}]}),
    chunk({"role": "assistant", "content": None}, 1),
    chunk(call("", id="call_1", type="function", named={"name": "f"}), 1),
    chunk(call('{"x":'), 1),
    chunk(call(" 1}"), 1),
    chunk(call("{}", 1, id="call_2", type="function", named={"name": "g"}), 1),
    chunk({}, 1, finish_reason="tool_calls"),
    chunk({"content": "!"}, finish_reason="stop"),
    {**chunk({}), "choices": [], "usage": USAGE},
]
WIRE = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in CHUNKS) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7])
async def test_a_stream_is_stored_as_its_whole_answer_whichever_way_its_bytes_come(front: Box, size: int) -> None:
    front.engines["e0"].script = sends(*(WIRE[at : at + size] for at in range(0, len(WIRE), size)))
    asked = chat(stream=True, n=2, stream_options={"include_usage": True}, **KEPT)
    response = await front.ask("POST", URL, asked)
    assert response.body.endswith(WIRE)
    (copy,) = await stored(front)
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    text = {"role": "assistant", "content": 'a "usage":{} data: [DONE]\n\n!', "reasoning": "hm"}
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    assert copy["response"] == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "usage": USAGE,
        "choices": [
            {"index": 0, "message": text, "logprobs": logprobs, "finish_reason": "stop"},
            {
                "index": 1,
                "message": {"role": "assistant", "content": None, "tool_calls": calls},
                "logprobs": None,
                "finish_reason": "tool_calls",
            },
        ],
    }
    assert not front.state.buffered_bytes, "what was gathered of a stream is accounted for until its end alone"


async def test_a_stream_without_its_end_is_not_stored(front: Box) -> None:
    front.engines["e0"].script = sends(*chat_events("a", "b", done=False))
    await front.ask("POST", URL, chat(stream=True, temperature=1, **KEPT))
    front.engines["e0"].script = answer_chat
    await front.ask("POST", URL, chat(**KEPT))
    assert [copy["response"] for copy in await stored(front)] == [chat_answer()]


@pytest.mark.parametrize("limits", [{"stored_response_bytes": 500}, {"response_copies_bytes": 0}])
async def test_a_stream_past_what_may_be_gathered_passes_and_is_not_stored(
    start_box: Start, limits: dict[str, int]
) -> None:
    box = await start_box(limits=limits, engine=sends(*chat_events(*"abcdefgh" * 4)))
    controller = await box.control(Controller())
    response = await box.ask("POST", URL, chat(stream=True, **KEPT))
    assert response.body.endswith(b"data: [DONE]\n\n") and response.body.count(b"data: {") >= 32
    assert not controller.requests and not box.gateway.controller.delivering and not box.state.buffered_bytes
