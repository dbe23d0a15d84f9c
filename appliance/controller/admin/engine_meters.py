"""What engines say of themselves at each scrape: vLLM's own figures, asked for on their private sockets.

An engine has hundreds of series. The few that this file names go out, under names and labels of the box.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.network.mutual_tls import http_options

WAIT_S: Final = 0.5
"""For one engine; the gateway gives the whole scrape two seconds. One that computes for longer is left out of it."""
MOST_BYTES: Final = 4 << 20

_KV, _RUNNING, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
_PREEMPTED = "vllm:num_preemptions_total"
_ASKED, _FOUND = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_NAMES: Final = frozenset({_KV, _RUNNING, _WAITING, _PREEMPTED, _ASKED, _FOUND})


@dataclass(frozen=True, slots=True)
class EngineReading:
    """figures: by vLLM's name, those of `_NAMES` that the engine told."""

    replica: str
    model: str
    figures: Mapping[str, float]


async def read(engines: Mapping[str, tuple[str, str]]) -> list[EngineReading]:
    """All that answer in time, side by side. engines: (model, path of the socket) by replica."""
    found = await asyncio.gather(*(_read(name, model, socket) for name, (model, socket) in engines.items()))
    return [reading for reading in found if reading is not None]


async def _read(replica: str, model: str, socket: str) -> EngineReading | None:
    try:
        async with asyncio.timeout(WAIT_S):
            base_url, options = http_options(socket)
            transport = httpx.AsyncHTTPTransport(**options)
            async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
                async with client.stream("GET", "/metrics", follow_redirects=False) as answer:
                    body = b""
                    async for piece in answer.aiter_bytes():
                        body += piece
                        if len(body) > MOST_BYTES:
                            return None
                    if answer.status_code != 200:
                        return None
    except (TimeoutError, httpx.TransportError):
        return None
    return EngineReading(replica, model, figures_of(body.decode(errors="replace")))


def figures_of(text: str) -> dict[str, float]:
    """The figures of Prometheus' text format that are told, each summed up over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _NAMES:
            try:
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
            except ValueError:
                continue
    return found


def families(readings: list[EngineReading]) -> Iterator[Metric]:
    """The box's own series of them."""
    of = ["replica", "model"]
    cache = GaugeMetricFamily("appliance_engine_kv_cache_ratio", "Share of an engine's KV cache in use.", labels=of)
    requests = GaugeMetricFamily(
        "appliance_engine_requests", "Requests that an engine computes, and those in its queue.", labels=[*of, "state"]
    )
    preempted = CounterMetricFamily(
        "appliance_engine_preemptions", "Requests that gave their place in the KV cache up to others.", labels=of
    )
    asked = CounterMetricFamily(
        "appliance_engine_prefix_tokens", "Tokens of prompts that were looked for in the cache of prefixes.", labels=of
    )
    hit = CounterMetricFamily("appliance_engine_prefix_hit_tokens", "Those that were there.", labels=of)
    for one in readings:
        for family, name in ((cache, _KV), (preempted, _PREEMPTED), (asked, _ASKED), (hit, _FOUND)):
            if (value := one.figures.get(name)) is not None:
                family.add_metric([one.replica, one.model], value)
        for state, name in (("running", _RUNNING), ("waiting", _WAITING)):
            if (value := one.figures.get(name)) is not None:
                requests.add_metric([one.replica, one.model, state], value)
    yield from (cache, requests, preempted, asked, hit)
