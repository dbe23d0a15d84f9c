"""What keys may spend and what they spent: limits by the minute, quotas, allowed models, and the sums of usage."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from appliance.gateway.allowance import Allowance, duration
from appliance.gateway.usage import Tokens, with_fingerprint, without_usage_event

from .conftest import KEY, Box, chat
from .test_continuation import completion, events, greedy_engine, text_of
from .upstreams import Reply, UpstreamRequest, chat_answer, chat_events


def limit(box: Box, **limits) -> None:
    box.keys[hashlib.sha256(KEY.encode()).hexdigest()] |= limits
    box.apply()


# --- the bucket


def test_a_minutes_worth_at_once_then_as_it_refills():
    allowance = Allowance(60, None, 0.0)
    assert [allowance.take(1, 0.0) for _ in range(60)] == [None] * 60
    refused = allowance.take(1, 0.0)
    assert refused is not None and (refused.what, refused.limit) == ("requests", 60)
    assert refused.wait_s == pytest.approx(1.0)
    assert allowance.take(1, 0.5) is not None and allowance.take(1, 1.0) is None


def test_what_is_refused_costs_nothing():
    allowance = Allowance(10, 100, 0.0)
    assert allowance.take(90, 0.0) is None
    assert allowance.take(90, 0.0).what == "tokens"
    assert dict(allowance.headers())[b"x-ratelimit-remaining-requests"] == b"9"


def test_a_request_larger_than_the_bucket_needs_a_full_one_and_is_paid_off_later():
    allowance = Allowance(None, 100, 0.0)
    assert allowance.take(500, 0.0) is None
    assert allowance.take(1, 60.0) is not None, "it is still 300 in debt"
    assert allowance.take(1, 301.0) is None


def test_the_difference_to_what_it_really_cost_comes_back():
    allowance = Allowance(None, 1000, 0.0)
    allowance.take(800, 0.0)
    allowance.correct(800, 50)
    assert dict(allowance.headers())[b"x-ratelimit-remaining-tokens"] == b"950"


@pytest.mark.parametrize(("seconds", "text"), [(0, b"0ms"), (0.02, b"20ms"), (1.5, b"1.5s"), (360, b"6m0s")])
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration(seconds) == text


# --- through the gateway


async def test_requests_by_the_minute(box: Box) -> None:
    limit(box, requests_per_minute=2, tokens_per_minute=100_000)
    first = await box.ask("POST", "/v1/chat/completions", chat())
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "100000"
    assert (await box.ask("POST", "/v1/chat/completions", chat(stream=True))).status == 200
    third = await box.ask("POST", "/v1/chat/completions", chat())
    assert third.status == 429 and third.error["code"] == "rate_limit_exceeded" and third.error["type"] == "requests"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(box.engines["e0"].requests) == 2
    other = await box.ask("POST", "/v1/chat/completions", chat(), key="sk-test-inference")
    assert other.status == 200 and "x-ratelimit-limit-requests" not in other.headers


async def test_a_used_up_quota_says_when_it_is_renewed(box: Box) -> None:
    limit(box, spent_until_s=time.time() + 3600)
    response = await box.ask("POST", "/v1/chat/completions", chat())
    assert response.status == 429 and response.error["code"] == "insufficient_quota"
    assert response.headers["x-should-retry"] == "false" and "retry-after" not in response.headers
    limit(box, spent_until_s=time.time() - 1)
    assert (await box.ask("POST", "/v1/chat/completions", chat())).status == 200


async def test_models_that_a_key_may_not_call_do_not_exist_for_it(box: Box) -> None:
    box.serve("other", "e0")
    limit(box, models=["other"])
    refused = await box.ask("POST", "/v1/chat/completions", chat())
    assert refused.status == 404 and refused.error["code"] == "model_not_found"
    assert (await box.ask("POST", "/v1/chat/completions", chat("other"))).status == 200


async def test_every_answer_is_counted_in_tokens(box: Box) -> None:
    assert (await box.ask("POST", "/v1/chat/completions", chat())).status == 200
    box.engines["e0"].script = greedy_engine({})
    for asks in (False, True):
        options = {"stream_options": {"include_usage": True}} if asks else {}
        response = await box.ask("POST", "/v1/completions", completion(stream=True, **options))
        assert ("usage" in events(response.body)[-1]) is asks
    (row,) = box.gateway.spending.meter.take()
    assert row == {
        "key": "key_all", "model": "m", "version": "v1", "requests": 3, "errors": 0,
        "prompt_tokens": 3 + 3 + 3, "completion_tokens": 2 + 6 + 6,
    }  # fmt: skip
    assert box.gateway.spending.meter.take() == []


async def test_a_continued_stream_is_counted_once(box: Box) -> None:
    box.engines["e0"].script = greedy_engine({"tokens": 3})
    body = chat(stream=True, temperature=0, max_tokens=50)
    response = await box.ask("POST", "/v1/chat/completions", body)
    assert response.body.endswith(b"[DONE]\n\n") and "usage" not in events(response.body)[-1]
    (row,) = box.gateway.spending.meter.take()
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, 3, 6)


async def test_the_added_event_is_taken_out_however_the_bytes_are_cut(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        assert request.json["stream_options"] == {"include_usage": True}
        stream = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
        stream += b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
        cut = len(box.engines["e0"].requests) * 8
        await reply.sse_head()
        await reply.chunk(stream[:cut])
        await reply.chunk(stream[cut:])
        await reply.end()

    box.engines["e0"].script = script
    for _ in range(20):
        response = await box.ask("POST", "/v1/chat/completions", chat(stream=True))
        assert response.status == 200, response.body
        assert text_of(response.body) == "a" and b"usage" not in response.body, response.body
        assert response.body.endswith(b"data: [DONE]\n\n")
    assert box.gateway.spending.meter.take()[0]["prompt_tokens"] == 140


async def test_failures_are_counted_too(box: Box) -> None:
    async def script(request: UpstreamRequest, reply: Reply) -> None:
        await reply.json({"error": {"message": "no", "type": "x", "code": 500}}, status=500)

    box.engines["e0"].script = script
    await box.ask("POST", "/v1/chat/completions", chat())
    (row,) = box.gateway.spending.meter.take()
    assert (row["requests"], row["errors"], row["prompt_tokens"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps(chat_answer()).encode(), (3, 2)),
        (json.dumps(chat_answer('"usage":{"prompt_tokens":9}')).encode(), (3, 2)),
        (b'{"type":"response.completed","response":{"usage":{"input_tokens":4,"output_tokens":5}}}', (4, 5)),
        (b'{"object":"list","usage":{"prompt_tokens":8,"total_tokens":8}}', (8, 0)),
        (b'{"choices":[],"usage":null}', (0, 0)),
    ],
    ids=["chat", "text that looks like usage", "responses", "embeddings", "none"],
)
def test_usage_is_found_in_every_shape(body, expected):
    tokens = Tokens()
    tokens.read(body.replace(b'"usage": {', b'"usage":{'))
    assert (tokens.prompt, tokens.completion) == expected


def test_anthropics_two_parts_add_up():
    tokens = Tokens()
    tokens.read(b'data: {"type":"message_start","message":{"usage":{"input_tokens":11,"output_tokens":0}}}\n\n')
    tokens.read(b'data: {"type":"message_delta","usage":{"output_tokens":6}}\n\n')
    assert (tokens.prompt, tokens.completion) == (11, 6)


def test_only_the_usage_event_goes():
    a, usage, done = b'data: {"choices":[{}]}\n\n', b'data: {"choices":[],"usage":{}}\n\n', b"data: [DONE]\n\n"
    assert without_usage_event(a + usage + done) == a + done
    assert without_usage_event(a + done) == a + done


def test_the_fingerprint_goes_into_the_events_that_end_a_choice():
    text = b'a \\"finish_reason\\":\\"stop\\" }'
    going = b'data: {"id":"1","choices":[{"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text
    ending = b'data: {"id":"1","choices":[{"index":%d,"finish_reason":"stop"}]}\n\n'
    stamped = with_fingerprint(going + ending % 0 + going + ending % 1 + b"data: [DONE]\n\n", 'v"2')
    events = [json.loads(event[6:]) for event in stamped.split(b"\n\n")[:4]]
    assert [event.get("system_fingerprint") for event in events] == [None, 'v"2', None, 'v"2']
    assert with_fingerprint(going, "v2") == going


async def test_a_stream_whose_usage_was_asked_for_keeps_its_fingerprint(box: Box) -> None:
    async def stream(request: UpstreamRequest, reply: Reply) -> None:
        assert request.json["stream_options"] == {"include_usage": True}
        await reply.sse_head()
        for event in chat_events("hel", "lo", done=False)[:1]:
            await reply.chunk(event)
        last, done = chat_events("lo")
        await reply.chunk(last.replace(b'": ', b'":').replace(b", ", b","))
        usage = b'{"prompt_tokens":3,"completion_tokens":9}'
        await reply.chunk(b'data: {"choices":[],"usage":%b,"system_fingerprint":"v1"}\n\n' % usage)
        await reply.chunk(done)
        await reply.end()

    box.engines["e0"].script = stream
    answer = await box.ask("POST", "/v1/chat/completions", chat(stream=True))
    shown = [json.loads(event[6:]) for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
    assert [event.get("system_fingerprint") for event in shown] == [None, "v1"] and "usage" not in shown[-1]
    (series,) = box.gateway.metrics.models["m"].values()
    rows = {sample.suffix: sample.value for sample in series.per_token.samples()}
    assert rows["_count"] == 1 and rows["_sum"] < 5
    assert box.gateway.spending.meter.take()[0]["completion_tokens"] == 9
