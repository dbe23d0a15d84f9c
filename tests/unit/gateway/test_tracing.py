"""Traces as a collector gets them: one streamed request that was held, and whose first engine died."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.front.collector import Collector, attributes, running_collector

from .conftest import Box, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with running_collector() as made:
        yield made


async def held_then_died_once(box: Box, headers: str) -> None:
    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        box.engines["e0"].script = answer_chat
        reply.die()

    await box.engine("e0", dies)
    box.serve("m", e0="draining")
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True), headers=headers)
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    box.serve("m", "e0")
    assert b"[DONE]" in (await wire.response()).body
    await box.until(lambda: not box.state.exchanges)


async def test_a_streamed_request_is_one_trace(start_box: Start, collector: Collector) -> None:
    box = await start_box(otlp_endpoint=collector.url)
    await held_then_died_once(box, f"traceparent: 00-{TRACE}-{PARENT}-01\r\n")
    await box.gateway.stop(0)
    assert set(collector.paths) == {"/v1/traces"}
    spans = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    ((request,), holds, attempts) = (
        [span for span in spans if span.name == name] for name in ("request", "hold", "attempt")
    )
    assert {span.trace_id.hex() for span in spans} == {TRACE} and request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in holds + attempts} == {request.span_id}
    assert holds and len(attempts) == 2 and len(spans) == len(holds) + 3
    assert holds[0].end_time_unix_nano <= attempts[0].start_time_unix_nano
    assert [(attributes(span)["attempt"], span.status.code) for span in attempts] == [(1, 2), (2, 0)]
    told = attributes(request)
    assert (told["model"], told["version"], told["key_id"]) == ("m", "v1", "key_all")
    assert told["http.response.status_code"] == 200 and told["request_id"].startswith("req_")
    conventions = {name: value for name, value in told.items() if name.startswith("gen_ai.")}
    assert conventions.pop("gen_ai.response.time_to_first_chunk") > 0
    assert conventions == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "appliance",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m@v1",
        "gen_ai.usage.input_tokens": 19,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 2,
    }
    # Each engine is told the attempt that it is, so that its own spans can go below it.
    sent = [request.headers["traceparent"] for request in box.engines["e0"].requests]
    assert sent == [f"00-{TRACE}-{span.span_id.hex()}-01" for span in attempts]
