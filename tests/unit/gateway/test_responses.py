"""Stored answers of /v1/responses and chat completions, and responses that continue earlier responses."""

import json
from typing import Any

import pytest

from appliance.gateway.core.table import cache_salt
from appliance.gateway.server import controller

from .conftest import Box, Start, chat, request_bytes
from .upstreams import Reply, UpstreamRequest, answer_chat, chat_answer, chat_events, sends

URL = "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "http://a/b"}


def answer(text: str = "hello", **more: Any) -> dict[str, Any]:
    """Build a response as vLLM writes it: vLLM neither stores responses nor knows earlier responses."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "resp_1a2b3c4d5e6f7a8b",
        "created_at": 7,
        "metadata": {"object": "response"},
        "model": "m",
        "object": "response",
        "output": [{"id": "msg_1", "type": "message", "role": "assistant", "content": content}],
        "previous_response_id": None,
        "status": "completed",
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
        **more,
    }


def event(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({**data, "type": kind}).encode())


def events(text: str = "hello") -> list[bytes]:
    begun = answer(status="in_progress", output=[], usage=None)
    return [
        event("response.created", response=begun, sequence_number=0),
        event("response.in_progress", response=begun, sequence_number=1),
        event("response.output_text.delta", delta="event: response.completed\ndata: {}\n\n", sequence_number=2),
        event("response.completed", response=answer(text), sequence_number=3),
    ]


async def answer_response(request: UpstreamRequest, reply: Reply) -> None:
    if request.json.get("stream"):
        await sends(*events())(request, reply)
    else:
        await reply.json(answer())


class Controller:
    """A fake controller that stores copies and has the earlier turns of the response `resp_known`."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Any]] = []
        self.status = 200
        self.earlier: list[Any] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]

    async def __call__(self, request: UpstreamRequest, reply: Reply) -> None:
        if request.method == "POST":
            if self.status == 200:
                self.copies += request.json
            await reply.json({}, self.status)
        elif request.target == "/internal/responses/context?id=resp_known":
            assert request.headers["x-appliance-key-id"] == "key_all"
            await reply.json(self.earlier)
        else:
            error = {"message": "not found", "type": "invalid_request_error", "param": "previous_response_id"}
            await reply.json({"error": {**error, "code": "previous_response_not_found"}}, 400)


async def stored(box: Box, count: int = 1) -> list[dict[str, Any]]:
    script = box.controller.script
    assert isinstance(script, Controller)
    await box.until(lambda: len(script.copies) >= count)
    return script.copies


@pytest.fixture
async def front(start_box: Start) -> Box:
    box = await start_box(engine=answer_response)
    await box.control(Controller())
    return box


@pytest.mark.parametrize("given", ["hi", [{"role": "user", "content": "hi"}]])
async def test_response_is_stored_with_input_and_key(front: Box, given: Any) -> None:
    response = await front.ask("POST", URL, {"model": "m", "input": given})
    said = json.loads(response.body)
    assert said["store"] is True and said["previous_response_id"] is None and said["error"] is None
    assert {name: value for name, value in said.items() if name not in ("store", "error")} == answer()
    (copy,) = await stored(front)
    assert copy == {"key": "key_all", "previous": None, "input": given, "response": said}
    salt = cache_salt("key_all")
    assert front.engines["e0"].requests[0].json == {"model": "m", "input": given, "cache_salt": salt}


@pytest.mark.parametrize("size", [1, 7])
async def test_streamed_response_stores_last_object(front: Box, size: int) -> None:
    whole = b"".join(events())
    front.engines["e0"].script = sends(*(whole[at : at + size] for at in range(0, len(whole), size)))
    response = await front.ask("POST", URL, {"model": "m", "input": "hi", "stream": True})
    seen = [json.loads(one.split(b"\ndata: ")[1]) for one in response.body.split(b"\n\n")[:-1]]
    kinds = [one["type"] for one in seen]
    assert kinds == ["response.created", "response.in_progress", "response.output_text.delta", "response.completed"]
    assert [one["response"]["store"] for one in seen if "response" in one] == [True] * 3
    assert [one["sequence_number"] for one in seen] == [0, 1, 2, 3]
    (copy,) = await stored(front)
    assert copy["response"] == seen[-1]["response"] and copy["input"] == "hi"


@pytest.mark.parametrize("stream", [False, True])
async def test_response_with_storing_off_reports_store_false(start_box: Start, stream: bool) -> None:
    for config, body in (({}, {"store": False}), ({"stores_responses": False}, {"store": True})):
        box = await start_box(**config, engine=answer_response)
        await box.control(Controller())
        response = await box.ask("POST", URL, {"model": "m", "input": "hi", "stream": stream, **body})
        assert b'"store":false' in response.body and b'"store":true' not in response.body
        assert not box.controller.requests


async def test_stored_copies_are_retried_and_delivered_once(start_box: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "RETRY_S", 0.01)
    box = await start_box(engine=answer_response)
    for number in range(3):
        assert (await box.ask("POST", URL, {"model": "m", "input": str(number)})).status == 200
    script = Controller()
    script.status = 500
    upstream = await box.control(script)
    await box.until(lambda: len(upstream.requests) >= 2)
    script.status = 200
    assert [copy["input"] for copy in await stored(box, 3)] == ["0", "1", "2"]
    await box.until(lambda: not box.gateway.controller.delivering)


@pytest.mark.parametrize("stream", [False, True])
async def test_response_with_previous_id_sends_whole_conversation_to_engine(front: Box, stream: bool) -> None:
    body = {"model": "m", "input": "and 3?", "previous_response_id": "resp_known", "stream": stream}
    response = await front.ask("POST", URL, body)
    assert response.status == 200
    asked = front.engines["e0"].requests[0].json
    assert "previous_response_id" not in asked
    assert asked["input"] == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"type": "message", "role": "user", "content": "and 3?"},
    ]
    text = response.body.split(b"data: ")[-1]
    said = json.loads(text)["response"] if stream else json.loads(text)
    assert said["previous_response_id"] == "resp_known"
    (copy,) = await stored(front)
    assert copy["previous"] == "resp_known" and copy["input"] == "and 3?"
    assert front.state.buffered_bytes == 0


async def test_response_with_unknown_previous_id_is_rejected(front: Box) -> None:
    wire = await front.connect()
    for _ in range(2):  # twice: the refusal does not close the connection
        await wire.send(request_bytes("POST", URL, {"model": "m", "input": "x", "previous_response_id": "../x?y&id=z"}))
        response = await wire.response()
        assert response.status == 400
        assert response.error["code"] == "previous_response_not_found"
        assert response.error["param"] == "previous_response_id"
    assert front.controller.requests[0].target == "/internal/responses/context?id=..%2Fx%3Fy%26id%3Dz"
    assert not front.engines["e0"].requests and front.state.buffered_bytes == 0


async def test_response_limits_apply_to_joined_input(start_box: Start) -> None:
    box = await start_box(limits={"inference_body_bytes": 2000, "json_depth": 10}, engine=answer_response)
    script = Controller()
    await box.control(script)
    for earlier, code in (
        ([{"role": "user", "content": "y" * 1950}], "request_too_large"),
        ([[[[[[[[[[["deep"]]]]]]]]]]], "invalid_json"),
        ([{"role": "user", "content": [IMAGE]}], "remote_media_refused"),
    ):
        script.earlier = earlier
        response = await box.ask("POST", URL, {"model": "m", "input": "x", "previous_response_id": "resp_known"})
        assert response.error["code"] == code
    assert not box.engines["e0"].requests and box.state.buffered_bytes == 0


async def test_input_tokens_include_earlier_turns(front: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        assert request.target == "/v1/responses/render"
        await reply.json({"token_ids": list(range(100_000)), "model": "m"})

    front.engines["e0"].script = script
    for more in ({}, {"previous_response_id": "resp_known"}):
        response = await front.ask("POST", URL + "/input_tokens", {"model": "m", "input": "x", **more})
        assert json.loads(response.body) == {"object": "response.input_tokens", "input_tokens": 100_000}
    assert len(front.engines["e0"].requests[1].json["input"]) == 3
    for more in ({"stream": True}, {"background": True}):
        response = await front.ask("POST", URL + "/input_tokens", {"model": "m", "input": "x", **more})
        assert response.status == 400 and response.error["code"] == "unsupported_parameter"
    assert [request.method for request in front.controller.requests] == ["GET"]


async def test_background_response_is_checked_and_relayed_to_controller(front: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.json({"asked": request.json, "key": request.headers["x-appliance-key-id"]})

    front.controller.script = script
    front.limit(tokens_per_minute=100)  # not charged: the controller's later request is
    body = {"model": "m", "input": "x", "background": True}
    wire = await front.connect()
    for _ in range(2):
        await wire.send(request_bytes("POST", URL, body))
        assert json.loads((await wire.response()).body) == {"asked": body, "key": "key_all"}
    for bad in ({"model": "none"}, {"temperature": 3}, {"input": None}):
        assert (await front.ask("POST", URL, {**body, **bad})).status in (400, 404)
    assert len(front.controller.requests) == 2 and not front.engines["e0"].requests
    assert front.state.buffered_bytes == 0


COMPLETIONS = "/v1/chat/completions"
KEPT = {"store": True, "metadata": {"use": "test"}}


@pytest.fixture
async def completing(start_box: Start) -> Box:
    box = await start_box(engine=answer_chat)
    await box.control(Controller())
    return box


async def test_chat_completion_is_stored_with_its_request(completing: Box) -> None:
    response = await completing.ask("POST", COMPLETIONS, chat(temperature=0.5, user="u", **KEPT))
    assert json.loads(response.body) == chat_answer()
    (copy,) = await stored(completing)
    asked = {"messages": chat()["messages"], "temperature": 0.5, "user": "u", "metadata": {"use": "test"}}
    assert copy == {"key": "key_all", "previous": None, "input": asked, "response": chat_answer()}


def part(delta: dict[str, Any], index: int = 0, **choice: Any) -> dict[str, Any]:
    made = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [made]}


def call(arguments: str, index: int = 0, name: str = "") -> dict[str, Any]:
    """Build a delta of a tool call; the first delta of a call has its name."""
    function = {"arguments": arguments, **({"name": name} if name else {})}
    first = {"id": f"call_{name}", "type": "function"} if name else {}
    return {"tool_calls": [{"index": index, **first, "function": function}]}


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
CHUNKS = [
    part({"role": "assistant", "content": ""}),
    part({"reasoning": "hm"}),
    part({"content": 'a "usage":{} '}, logprobs={"content": [{"token": "a", "logprob": -0.5}]}),
    part({"content": "data: [DONE]\n\n"}, logprobs={"content": [{"token": "b", "logprob": -1.5}]}),
    part({"role": "assistant", "content": None}, 1),
    part(call("", name="f"), 1),
    part(call('{"x":'), 1),
    part(call(" 1}"), 1),
    part(call("{}", 1, name="g"), 1),
    part({}, 1, finish_reason="tool_calls"),
    part({"content": "!"}, finish_reason="stop"),
    {**part({}), "choices": [], "usage": USAGE},
]
WIRE = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in CHUNKS) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7])
async def test_streamed_chat_is_stored_as_whole_completion(completing: Box, size: int) -> None:
    completing.engines["e0"].script = sends(*(WIRE[at : at + size] for at in range(0, len(WIRE), size)))
    asked = chat(stream=True, n=2, stream_options={"include_usage": True}, **KEPT)
    response = await completing.ask("POST", COMPLETIONS, asked)
    assert response.body.endswith(WIRE)
    (copy,) = await stored(completing)
    text = {"role": "assistant", "content": 'a "usage":{} data: [DONE]\n\n!', "reasoning": "hm"}
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    (first,), (second,) = (
        call(arguments, name=name)["tool_calls"] for arguments, name in (('{"x": 1}', "f"), ("{}", "g"))
    )
    calls = {"role": "assistant", "content": None, "tool_calls": [first, second]}
    for one in (first, second):
        del one["index"]
    assert copy["response"] == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "usage": USAGE,
        "choices": [
            {"index": 0, "message": text, "logprobs": logprobs, "finish_reason": "stop"},
            {"index": 1, "message": calls, "logprobs": None, "finish_reason": "tool_calls"},
        ],
    }
    assert not completing.state.buffered_bytes, "what was gathered of a stream is accounted for until its end alone"


async def test_incomplete_chat_stream_is_not_stored(completing: Box) -> None:
    completing.engines["e0"].script = sends(*chat_events("a", "b", done=False))
    await completing.ask("POST", COMPLETIONS, chat(stream=True, temperature=1, **KEPT))
    completing.engines["e0"].script = answer_chat
    await completing.ask("POST", COMPLETIONS, chat(**KEPT))
    assert [copy["response"] for copy in await stored(completing)] == [chat_answer()]


@pytest.mark.parametrize("limits", [{"stored_response_bytes": 500}, {"response_copies_bytes": 0}])
async def test_chat_stream_over_limits_is_not_stored(start_box: Start, limits: dict[str, int]) -> None:
    box = await start_box(limits=limits, engine=sends(*chat_events(*"abcdefgh" * 4)))
    controller = await box.control(Controller())
    response = await box.ask("POST", COMPLETIONS, chat(stream=True, **KEPT))
    assert response.body.endswith(b"data: [DONE]\n\n") and response.body.count(b"data: {") >= 32
    assert not controller.requests and not box.gateway.controller.delivering and not box.state.buffered_bytes
