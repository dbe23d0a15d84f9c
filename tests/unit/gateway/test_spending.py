"""What keys may spend: limits per minute, quotas and limits per owner; and usage sums."""

import asyncio
import json
import time

import orjson

from appliance.gateway.core.spending import OwnerUse
from appliance.gateway.requests.answers import Tokens

from .conftest import KEY, Box, Start, chat, digest, request_bytes
from .test_inference import completion, events, greedy_engine
from .test_responses import event
from .upstreams import Reply, UpstreamRequest, chat_answer, hangs, sends

URL = "/v1/chat/completions"


async def engine_has(box: Box, number: int) -> None:
    await box.until(lambda: len(box.engines["e0"].requests) == number)


async def test_requests_over_rate_limit_are_refused(box: Box) -> None:
    box.limit(requests_per_minute=2, tokens_per_minute=100_000)
    first = await box.ask("POST", URL, chat())
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "100000"
    assert (await box.ask("POST", URL, chat(stream=True))).status == 200
    third = await box.ask("POST", URL, chat())
    assert third.status == 429 and third.error["code"] == "rate_limit_exceeded" and third.error["type"] == "requests"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(box.engines["e0"].requests) == 2
    other = await box.ask("POST", URL, chat(), key="sk-test-inference")
    assert other.status == 200 and "x-ratelimit-limit-requests" not in other.headers


async def test_requests_over_quota_are_refused_until_it_renews(box: Box) -> None:
    box.limit(spent_until_s=time.time() + 3600, spent_quota="1,000 tokens a day")
    response = await box.ask("POST", URL, chat())
    assert response.status == 429 and response.error["code"] == "insufficient_quota"
    assert "1,000 tokens a day" in response.error["message"]
    assert response.headers["x-should-retry"] == "false" and "retry-after" not in response.headers
    box.limit(spent_until_s=time.time() - 1)
    assert (await box.ask("POST", URL, chat())).status == 200


async def test_open_requests_together_reserve_at_most_the_quota(start_box: Start) -> None:
    box = await start_box(engine=hangs)
    box.limit(quota=500)
    asked = chat(max_tokens=100, n=2)
    wires = []
    for number in (1, 2):
        wires.append(await box.send("POST", URL, asked))
        await engine_has(box, number)
    refused = await box.ask("POST", URL, asked)
    assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
    assert "allows 500 at once" in refused.error["message"] and refused.headers["retry-after"] == "1"
    wires[0].close()
    use = use_of(box, KEY)
    await box.until(lambda: use.requests == 1)
    wires[1].close()
    await box.until(lambda: use.requests == 0)
    await box.send("POST", URL, chat(max_tokens=4000))
    await engine_has(box, 3)  # a request that runs alone may reserve more than the quota


async def test_usage_of_every_answer_is_charged(box: Box) -> None:
    assert (await box.ask("POST", URL, chat())).status == 200
    box.engines["e0"].script = greedy_engine({})
    for asks in (False, True):
        options = {"stream_options": {"include_usage": True}} if asks else {}
        response = await box.ask("POST", "/v1/completions", completion(stream=True, **options))
        assert ("usage" in events(response.body)[-1]) is asks
    (row,) = box.state.spending.take_sums()
    counts = {"requests": 3, "errors": 0, "refused": 0, "prompt_tokens": 3 + 3 + 3, "completion_tokens": 2 + 6 + 6}
    assert row == {"key": "key_all", "model": "m", "version": "v1", **counts}
    assert box.state.spending.take_sums() == []


def test_usage_is_parsed_from_every_api_shape() -> None:
    for body, expected in (
        (json.dumps(chat_answer()).encode(), (3, 2)),
        (json.dumps(chat_answer('"usage":{"prompt_tokens":9}')).encode(), (3, 2)),
        (b'{"type":"response.completed","response":{"usage":{"input_tokens":4,"output_tokens":5}}}', (4, 5)),
        (b'{"object":"list","usage":{"prompt_tokens":8,"total_tokens":8}}', (8, 0)),
        (b'{"choices":[],"usage":null}', (0, 0)),
    ):
        tokens = Tokens()
        tokens.read(body)
        assert (tokens.prompt, tokens.completion) == expected


async def test_usage_inside_tool_schema_is_not_charged(box: Box) -> None:
    """Events of /v1/responses repeat the request's tools, and a tool schema may have a field `usage`."""
    schema = {"type": "object", "properties": {"usage": {"input_tokens": 900_000, "output_tokens": 900_000}}}
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    begun = {"object": "response", "status": "in_progress", "tools": tools, "usage": None}
    ended = begun | {"status": "completed", "usage": {"input_tokens": 7, "output_tokens": 5}}
    box.engines["e0"].script = sends(
        event("response.created", response=begun), event("response.completed", response=ended)
    )
    await box.ask("POST", "/v1/responses", {"model": "m", "input": "x", "stream": True, "tools": tools})
    (row,) = box.state.spending.take_sums()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 5)


async def test_usage_of_answer_larger_than_buffer_is_charged(start_box: Start) -> None:
    raw = orjson.dumps({"text": "w" * 3000, "usage": {"prompt_tokens": 30_000, "completion_tokens": 50_000}})

    async def answer(request: UpstreamRequest, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw))
        for piece in (raw[:1500], raw[1500:-5], raw[-5:]):  # the last cut is inside a number
            await reply.raw(piece)
            await asyncio.sleep(0.01)

    box = await start_box(limits={"buffered_response_bytes": 1000}, engine=answer)
    assert (await box.ask("POST", URL, chat())).body == raw
    (row,) = box.state.spending.take_sums()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (30_000, 50_000)


async def test_refusals_are_counted_by_key_and_model(box: Box) -> None:
    for body, status in ((chat("nobody"), 404), (b"{", 400), (chat(nonsense=1), 400), (chat(n=10_000), 400)):
        assert (await box.ask("POST", URL, body)).status == status
    rows = {row["model"]: row for row in box.state.spending.take_sums()}
    assert {model: (row["refused"], row["requests"]) for model, row in rows.items()} == {"": (2, 0), "m": (2, 0)}
    assert {row["key"] for row in rows.values()} == {"key_all"}


def use_of(box: Box, key: str) -> OwnerUse:
    return box.state.spending.use_of(box.state.keys[digest(key)]).owner


async def test_limits_are_shared_by_all_keys_of_owner(start_box: Start) -> None:
    box = await start_box(limits={"owner_requests": 2, "owner_body_bytes": 3000}, engine=hangs)
    for key in ("sk-test-inference", "sk-test-tuning"):
        box.limit(key, owner="ann", scopes=["inference"])
    first, second = "sk-test-inference", "sk-test-tuning"
    wires = [await box.send("POST", URL, chat(stream=True), key=first)]
    await engine_has(box, 1)
    wires.append(await box.send("POST", URL, chat(), key=second))
    await engine_has(box, 2)
    refused = await box.ask("POST", URL, chat(), key=first)
    assert refused.status == 429 and "2 requests" in refused.error["message"]
    for wire in wires:
        wire.close()
    await box.until(lambda: use_of(box, first).requests == 0 and use_of(box, second) is use_of(box, first))
    slow = await box.connect()
    await slow.send(request_bytes("POST", URL, b"x" * 2500, key=first)[:-100])
    await box.until(lambda: use_of(box, first).body_bytes > 2000)
    large = await box.ask("POST", URL, chat(user="x" * 1000), key=second)
    assert large.status == 429 and "bytes" in large.error["message"]
    other = asyncio.ensure_future(box.ask("POST", URL, chat(user="x" * 1000)))
    await engine_has(box, 3)  # a request of another owner is not limited
    other.cancel()
    slow.close()
    await box.until(lambda: use_of(box, first).body_bytes == 0)


async def test_cache_salt_is_set_per_owner_on_every_route(box: Box) -> None:
    box.serve("e", "e0", task="embed")
    bodies = {
        "/v1/chat/completions": chat(),
        "/v1/completions": {"model": "m", "prompt": "x", "stream": True, "temperature": 0},
        "/v1/responses": {"model": "m", "input": "x"},
        "/v1/responses/input_tokens": {"model": "m", "input": "x"},
        "/v1/messages": chat(max_tokens=3),
        "/v1/messages/count_tokens": chat(),
        "/v1/embeddings": {"model": "e", "input": "x"},
    }

    async def salt(key: str, own: str | None = None) -> str:
        box.engines["e0"].requests.clear()
        for path, body in bodies.items():
            await box.ask("POST", path, body | ({"cache_salt": own} if own else {}), key=key)
        assert len(box.engines["e0"].requests) == len(bodies)
        (found,) = {request.json["cache_salt"] for request in box.engines["e0"].requests}
        return found

    one, other = await salt(KEY), await salt("sk-test-inference")
    apart = await salt(KEY, "mine")
    assert len({one, other, apart, await salt("sk-test-inference", "mine"), await salt(KEY, other)}) == 5
    assert apart.partition(".")[0] == one, "an engine keeps compiled forms by this part alone"
    for key in (KEY, "sk-test-inference"):
        box.limit(key, owner="one person")
    assert await salt(KEY) == await salt("sk-test-inference")
