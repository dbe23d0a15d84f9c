"""Valid requests: answers keep the engine's body, get the gateway's head, and survive an engine's death if greedy."""

import asyncio
import json
import random
from typing import Any

import pytest

from appliance.gateway.requests.answers import continuation_of

from .conftest import Box, Start, chat, request_bytes, salted
from .upstreams import Reply, Script, UpstreamRequest, chat_events, gives, sends


async def test_plain_answer_has_exact_body_and_gateway_head(box: Box) -> None:
    body = b'{"id": "x",   "odd spacing":  1}'
    box.engines["e0"].script = gives(body, headers="x-engine-secret: 1\r\nset-cookie: a=b\r\n")
    sent = b'{"model":"m","messages":[{"role":"user","content":"\xc3\xbc"}],  "seed":1}'
    response = await box.ask("POST", "/v1/chat/completions", sent, headers="X-Appliance-Scopes: admin\r\nCookie: a\r\n")
    assert response.status == 200
    assert response.body == body
    assert response.headers["x-appliance-model-version"] == "v1"
    assert response.headers["x-request-id"].startswith("req_")
    assert not {"x-engine-secret", "set-cookie", "server"} & set(response.headers)
    seen = box.engines["e0"].requests[0]
    assert seen.body == salted(sent)
    ours = {"x-request-id", "x-vllm-priority"}
    assert set(seen.headers) == {"host", "content-type", "content-length"} | ours


async def test_stream_sends_first_token_at_once(box: Box) -> None:
    go_on = asyncio.Event()
    first, *rest = chat_events("a", "b")

    box.engines["e0"].script = sends(first, *rest, go_on=go_on)
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True))
    status, headers, _ = await wire.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert await wire.chunk() == first
    go_on.set()
    assert await wire.response_body() == b"".join(rest)


async def test_version_header_names_version_reported_by_the_engine(box: Box) -> None:
    named = "x-appliance-model-version: v2\r\n"

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        if not request.json.get("stream"):
            await reply.json({"ok": 1}, headers=named)
            return
        await reply.sse_head(named)
        await reply.chunk(b'data: {"a": 1}\n\ndata: [DONE]\n\n')
        await reply.end()

    box.engines["e0"].script = script
    for stream in (False, True):
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=stream))
        assert response.headers["x-appliance-model-version"] == "v2"
    assert "v2" in {version for _, version, _ in box.state.metrics.series}
    box.serve("mine", "e0")
    box.models["mine"]["adapter"] = "a7"
    box.apply()
    response = await box.ask("POST", "/v1/chat/completions", chat("mine"))
    assert response.headers["x-appliance-model-version"] == "v1"


async def test_expect_header_gets_100_continue(box: Box) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    whole = request_bytes("POST", "/v1/chat/completions", body, headers="Expect: 100-continue\r\n")
    wire = await box.connect()
    await wire.send(whole[: -len(body)])
    assert (await wire.head())[0] == 100
    await wire.send(body)
    assert (await wire.response()).status == 200
    refused = await box.send("POST", "/v1/models", key=None, headers="Expect: 100-continue\r\nContent-Length: 9\r\n")
    assert (await refused.response()).headers["connection"] == "close"


PROMPT = [5, 6, 7]
# (token id, text): each token has its text, except that "é" takes two tokens and the first one has no text.
TOKENS = [(11, "Hel"), (12, "lo"), (13, ""), (14, "é"), (15, ' "token_ids":[1] '), (16, "!")]
TEXT = "".join(text for _, text in TOKENS)


def greedy_engine(lives: dict[str, int]) -> Script:
    """Script an engine that always sends TOKENS; it dies once, after `lives["tokens"]` tokens."""
    draw = random.Random(0)

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        body, is_chat = request.json, request.target == "/v1/chat/completions"
        prompt = PROMPT if is_chat or isinstance(body["prompt"], str) else body["prompt"]
        done = len(prompt) - len(PROMPT)
        assert prompt == PROMPT + [token for token, _ in TOKENS[:done]], "asked to go on from other tokens"
        budget = min(len(TOKENS) - done, body.get("max_tokens") or 99)
        ids = bool(body.get("return_token_ids"))
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": f"id-{done}", "object": kind, "created": 1 + done, "model": "m"}
        first = {"index": 0, "logprobs": None, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks: list[dict[str, Any]] = [{"choices": [first], **({"prompt_token_ids": prompt} if ids else {})}] * is_chat
        for i, (token, text) in enumerate(TOKENS[done : done + budget]):
            choice: dict[str, Any] = {"index": 0, "logprobs": None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            choice["finish_reason"] = "stop" if i == budget - 1 else None
            choice |= {"token_ids": [token]} if ids else {}
            choice |= {"prompt_token_ids": prompt} if ids and not is_chat and i == 0 else {}
            chunks.append({"choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            n = len(prompt)
            usage = {"prompt_tokens": n, "completion_tokens": budget, "total_tokens": n + budget}
            chunks.append({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}})
        await reply.sse_head()
        dies_at = lives.pop("tokens", 99) + is_chat
        for chunk in chunks[:dies_at]:
            event = b"data: " + json.dumps(head | chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
            cut = draw.randrange(1, len(event))  # split each event at a random byte into two chunks
            await reply.raw(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (event[:cut], event[cut:])))
        if dies_at < len(chunks):
            reply.die()
            return
        await reply.chunk(b"data: [DONE]\n\n")
        await reply.end()

    return script


def events(body: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


def text_of(body: bytes) -> str:
    choices = [choice for event in events(body) for choice in event["choices"]]
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


def completion(**more) -> dict:
    return {"model": "m", "prompt": "Hi", "max_tokens": 50, **more}


@pytest.mark.parametrize("dies_after", [1, 3, 4])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_greedy_stream_continues_after_engine_death(box: Box, route: str, dies_after: int) -> None:
    body = (chat if route.startswith("chat") else completion)(
        stream=True, temperature=0, max_tokens=50, stream_options={"include_usage": True}
    )
    box.engines["e0"].script = greedy_engine({})
    unbroken = await box.ask("POST", f"/v1/{route}", body)
    box.engines["e0"].script = greedy_engine({"tokens": dies_after})
    broken = await box.ask("POST", f"/v1/{route}", body)

    assert unbroken.status == broken.status == 200
    assert text_of(broken.body) == text_of(unbroken.body) == TEXT
    assert broken.body.endswith(b"data: [DONE]\n\n")
    seen = events(broken.body)
    assert {event["id"] for event in seen} == {"id-0"} and len({event["object"] for event in seen}) == 1
    assert seen[-1]["usage"] == events(unbroken.body)[-1]["usage"]
    finished = [c["finish_reason"] for event in seen for c in event["choices"] if c["finish_reason"]]
    assert finished == ["stop"]
    assert box.state.metrics.events["continued"] == 1 and not box.state.metrics.events["broke_off"]


async def test_broken_greedy_stream_waits_with_held_comments(start_box: Start) -> None:
    box = await start_box(holds={"sse_grace_s": 0.01, "sse_interval_s": 0.01})
    await box.engine("e0", greedy_engine({"tokens": 2}))
    await box.engine("e1", greedy_engine({}))
    box.serve("m", "e0")
    wire = await box.connect()
    body = chat(stream=True, temperature=0, max_tokens=50)
    await wire.send(request_bytes("POST", "/v1/chat/completions", body))
    await wire.head()
    await box.until(lambda: box.state.metrics.events["continued"] == 1)
    box.serve("m")  # now the model has no replica
    received = b""
    while b": held" not in received:
        received += await wire.chunk()
    box.serve("m", "e1")
    received += await wire.response_body()
    assert text_of(received) == TEXT and b": version v1" in received


def test_continuation_is_only_for_greedy_requests_of_plain_text() -> None:
    for more in (
        {"temperature": 0.7},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": True},
        {"return_token_ids": True},
    ):
        assert continuation_of("chat.completions", chat(**{"stream": True, "temperature": 0, **more})) is None


def test_continuation_is_refused_until_reasoning_has_ended() -> None:
    for deltas, resumes in (
        ([{"role": "assistant", "content": ""}], False),
        ([{"reasoning_content": "Let me see"}], False),
        ([{"reasoning": 'I write "content":"x"'}], False),
        ([{"reasoning": "Let me see"}, {"content": "Four"}], True),
        ([{"content": "Four"}], True),
    ):
        continuation = continuation_of("chat.completions", chat(stream=True, temperature=0, max_tokens=99))
        assert continuation is not None
        for number, delta in enumerate(deltas):
            choice = {"index": 0, "delta": delta, "token_ids": [number]}
            event = {"id": "a", "choices": [choice], "prompt_token_ids": [1, 2]}
            continuation.event(b"data: " + json.dumps(event, separators=(",", ":")).encode())
        assert (continuation.resume_body(None) is not None) is resumes
