"""The gateway's answer to /metrics, and traces as a collector receives them."""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from appliance.gateway.core.table import NOBODY
from appliance.gateway.server.metrics import MOST_SERIES, Metrics, prefill_tokens_per_s
from tests.front.collector import Collector, attributes, running_collector

from .conftest import Box, Start, chat
from .upstreams import Reply, UpstreamRequest, answer_chat


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_metrics_have_series_by_model_version_and_key_class(box: Box) -> None:
    await box.ask("POST", "/v1/chat/completions", chat(stream=True))
    await box.ask("POST", "/v1/chat/completions", chat(), key="sk-test-inference")
    text = (await box.ask("GET", "/metrics")).body
    found = values(text)
    every = (("key_class", "inference+fine_tuning+admin"), ("model", "m"), ("version", "v1"))
    inference = (("key_class", "inference"), ("model", "m"), ("version", "v1"))
    for labels in (every, inference):
        assert found["appliance_gateway_request_seconds_count", labels] == 1
        assert found["appliance_gateway_time_to_first_byte_seconds_count", labels] == 1
        assert found["appliance_gateway_model_requests_total", tuple(sorted((*labels, ("status", "200"))))] == 1
    assert found["appliance_gateway_time_per_output_token_seconds_count", every] == 1, "of the stream"
    assert ("appliance_gateway_time_per_output_token_seconds_count", inference) not in found, "one body has no pace"
    for direction, count in (("input", 3), ("output", 2)):
        assert found["appliance_gateway_tokens_total", tuple(sorted((*inference, ("direction", direction))))] == count
    assert b"sk-test" not in text and b"key_all" not in text


async def test_metrics_include_controller_series_if_it_is_up(box: Box) -> None:
    assert values((await box.ask("GET", "/metrics")).body)["appliance_controller_up", ()] == 0

    async def control(request: UpstreamRequest, reply: Reply) -> None:
        assert (request.method, request.target) == ("GET", "/admin/v1/metrics")
        assert request.headers["x-appliance-scopes"] == "admin,fine_tuning,inference"
        body = b"# HELP appliance_mode m\n# TYPE appliance_mode gauge\nappliance_mode 1.0\n"
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    await box.control(control)
    found = values((await box.ask("GET", "/metrics")).body)
    assert found["appliance_controller_up", ()] == 1 and found["appliance_mode", ()] == 1


async def test_traceparent_is_forwarded_only_if_well_formed(box: Box) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await box.ask("POST", "/v1/chat/completions", chat(), headers=f"traceparent: {trace}\r\n")
    assert box.engines["e0"].requests[-1].headers["traceparent"] == trace
    for bad in (f"00-{'0' * 32}-00f067aa0ba902b7-01", trace.upper(), trace + "-x", "00"):
        await box.ask("POST", "/v1/chat/completions", chat(), headers=f"traceparent: {bad}\r\n")
        assert "traceparent" not in box.engines["e0"].requests[-1].headers


def test_metrics_reset_at_series_limit() -> None:
    metrics = Metrics()
    for version in range(3 * MOST_SERIES):
        named = SimpleNamespace(model="m", model_version=f"v{version}", caller=NOBODY)
        metrics.first_byte(*metrics.series_of(cast(Any, named))).observe(1.0)
    text = generate_latest(metrics.registry)
    newest = {f"v{version}" for version in range(2 * MOST_SERIES, 3 * MOST_SERIES)}
    assert {dict(labels)["version"] for name, labels in values(text) if "version" in dict(labels)} == newest


async def test_access_log_masks_key_names(start_box: Start, tmp_path: Path) -> None:
    box, key = await start_box(log_path=str(tmp_path / "access.log")), "/admin/v1/keys/key_" + "a1" * 12
    for path in ("/admin/v1/keys/ann", "/v1/keys/key_ann", key, "/v1/files/keys"):
        await box.ask("GET", path, key=None)
    box.state.write_access_log()
    lines = [json.loads(line)["path"] for line in (tmp_path / "access.log").read_text().splitlines()]
    assert lines == ["/admin/v1/keys/*", "/v1/keys/*", key, "/v1/files/keys"]


def starts(count: int, *, rate: float, fixed_s: float = 0.03, jitter: float = 0.1) -> list[tuple[int, float]]:
    rng = random.Random(7)
    tokens = [rng.choice((100, 300, 900, 2000, 4000)) for _ in range(count)]
    return [(n, (fixed_s + n / rate) * rng.uniform(1 - jitter, 1 + jitter)) for n in tokens]


@pytest.mark.parametrize("rate", [500.0, 20_000.0])
def test_prefill_rate_excludes_constant_time_per_request(rate):
    assert prefill_tokens_per_s(starts(48, rate=rate)) == pytest.approx(rate, rel=0.2)


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
    box.serve("m", "e0:draining")
    wire = await box.send("POST", "/v1/chat/completions", chat(stream=True), headers=headers)
    await box.until(lambda: box.state.holds.models()["m"] == 1)
    box.serve("m", "e0")
    assert b"[DONE]" in (await wire.response()).body
    await box.until(lambda: not box.state.exchanges)


async def test_streamed_request_makes_one_trace(start_box: Start, collector: Collector) -> None:
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
    # Each engine receives the span of its attempt as the parent for spans of the engine.
    sent = [request.headers["traceparent"] for request in box.engines["e0"].requests]
    assert sent == [f"00-{TRACE}-{span.span_id.hex()}-01" for span in attempts]
