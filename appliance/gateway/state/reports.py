"""Builds one gateway's load report for the controller, and its Prometheus text."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.observe.exposition import joined
from appliance.gateway.observe.row_load import RowLoad
from appliance.gateway.state.state import State

# Number of skipped table rows that a report lists one by one.
REFUSED_ROWS_REPORTED: Final = 10


# -- the load report


def load_report(state: State) -> dict[str, Any]:
    """The load report of the bus. Times: Unix seconds, or durations in seconds.

    A model that no request has named since this process began has no row. Counts of arrivals are since `started_s`, by
    bucket of prompt tokens and of time. waiting_prompt_tokens: of requests without a first token, as far as visible;
    prompt_tokens: of all in flight and held.
    """
    now_s, holds = time.monotonic(), state.holds
    inflight, waiting, prompts = Counter[str](), Counter[str](), Counter[str]()
    for exchange in state.exchanges:
        request, work, choice = exchange.request, exchange.work, exchange.choice
        if work is None or work.batch:
            continue
        inflight[request.row] += 1
        prompts[request.row] += work.prompt_tokens
        if request.streams:
            waiting[request.row] += work.prompt_tokens if choice is None else choice.pending
    rows = {
        name: {
            "inflight": inflight[name] - holds.held(name),
            "held": holds.held(name),
            "waiting_prompt_tokens": waiting[name],
            "prompt_tokens": prompts[name],
            **(state.metrics.rows.get(name) or RowLoad()).report(now_s, time.time()),
        }
        for name in {*inflight, *state.metrics.rows} & state.router.models.keys()
    }
    return {
        "type": "load",
        "generation": state.generation,
        "gateway": state.config.name,
        "started_s": state.started_s,
        "replicas": {name: {"inflight": load.inflight} for name, load in state.router.loads.items()},
        "models": rows,
        "canaries": state.comparison.canaries,
        "notes": notes(state),
        "certificate_expires_s": None if state.certificate is None else state.certificate.expires_s,
    }


def notes(state: State) -> list[str]:
    """Problems of this gateway for the box's status page."""
    lines = [f"the gateway skips a row of its table: {text}" for text in state.refused_rows[:REFUSED_ROWS_REPORTED]]
    if state.certificate is not None:
        lines += state.certificate.notes(time.time())
    return lines


# -- Prometheus


async def metrics_text(state: State, *, controller_up: bool) -> bytes:
    """Series of this gateway, all its workers together."""
    up = _gauge("controller_up", "Whether the controller answered this scrape.", int(controller_up))
    others = [] if state.snapshots is None else state.snapshots.others()
    return joined([await series_text(state, up), *others])


async def series_text(state: State, *more: Metric) -> str:
    """Text of this worker's series and of `more`, with the label `worker` where there are several workers."""
    of_now = [state.metrics.counted_events(), *gauges(state), *more]
    # In a thread, as it may take 0.3 s; what is read of the state is read here.
    return await asyncio.to_thread(_text, of_now, state.metrics.registry, state.config)


def _text(of_now: list[Metric], registry: CollectorRegistry, config: GatewayConfig) -> str:
    worker = {"worker": config.name} if config.workers > 1 else {}
    families = [*of_now, *registry.collect()]
    for family in families:
        family.samples = [sample._replace(labels=worker | sample.labels) for sample in family.samples]
    return generate_latest(_Collected(families)).decode()


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def gauges(state: State) -> Iterator[Metric]:
    """What is so now."""
    yield _gauge("gateway_connections", "Open client connections.", len(state.connections))
    yield _gauge("gateway_table_generation", "Routing table in force, -1 before the first.", state.generation)
    yield _gauge("gateway_buffered_body_bytes", "Request bodies in memory.", state.buffered_bytes)
    yield _gauge("gateway_start_time_seconds", "Unix time of the start.", state.started_s)
    yield _gauge("gateway_table_rows_refused", "Rows of the table in force that are skipped.", len(state.refused_rows))
    if state.certificate is not None:
        expires_s = state.certificate.expires_s
        yield _gauge("tls_expiry_seconds", "Unix time at which the endpoint's certificate expires.", expires_s)
    holding = sorted({*(model for model, _, _ in state.metrics.series), *state.holds.models()})
    held = [({"model": name}, state.holds.held(name)) for name in holding]
    yield _gauge("gateway_held", "Requests waiting for a replica.", *held)
    inflight = [({"replica": name}, load.inflight) for name, load in state.router.loads.items()]
    yield _gauge("gateway_inflight", "Requests on a replica.", *inflight)
    parts = [({"part": name}, 1) for name in state.background.names()]
    yield _gauge("gateway_degraded", "1 while a part of the gateway fails and is tried again.", *parts)


def _gauge(name: str, text: str, *values: float | tuple[dict[str, str], float]) -> Metric:
    """values: one, or one for each set of labels."""
    family = GaugeMetricFamily(f"appliance_{name}", text)
    for value in values:
        labels, number = value if isinstance(value, tuple) else ({}, value)
        family.add_sample(family.name, labels, number)
    return family
