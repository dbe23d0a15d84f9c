"""Builds one gateway's load report for the controller, and its Prometheus text.

Each of several workers keeps a snapshot of its series beside the bus socket; the scraped one adds those of the others
to its own. Each series has the label `worker`, so that to Prometheus a restarted worker resets only its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.gateway.access.load import ModelLoad
from appliance.gateway.server.state import State
from runtime.replace_file import replace_file

STALE_S: Final = 30.0
"""Age of a snapshot whose worker is gone; its successor writes to the same file."""


def load_report(state: State) -> dict[str, Any]:
    """The load report of the bus. Times: Unix seconds, or durations in seconds.

    Models that no request has named since this process began are left out. Counts of arrivals are since `started_s`, by
    bucket of prompt tokens and of time. waiting_prompt_tokens: of requests without a first token, as far as visible;
    prompt_tokens: of all in flight and held.
    """
    now_s, holds, certificate = time.monotonic(), state.holds, state.certificate
    inflight, waiting, prompts = Counter[str](), Counter[str](), Counter[str]()
    for exchange in state.exchanges:
        work, choice, model = exchange.work, exchange.choice, exchange.routed_model
        if work is None or work.batch:
            continue
        inflight[model] += 1
        prompts[model] += work.prompt_tokens
        if exchange.streams:
            waiting[model] += work.prompt_tokens if choice is None else choice.pending
    models = {
        name: {
            "inflight": inflight[name] - holds.held(name),
            "held": holds.held(name),
            "waiting_prompt_tokens": waiting[name],
            "prompt_tokens": prompts[name],
            **(state.metrics.loads.get(name) or ModelLoad()).report(now_s, time.time()),
        }
        for name in {*inflight, *state.metrics.loads} & state.router.models.keys()
    }
    return {
        "type": "load",
        "generation": state.generation,
        "gateway": state.config.name,
        "started_s": state.started_s,
        "replicas": {name: {"inflight": load.inflight} for name, load in state.router.loads.items()},
        "models": models,
        "canaries": state.comparison.canaries,
        "notes": [] if certificate is None else certificate.notes(time.time()),
        "certificate_expires_s": None if certificate is None else certificate.expires_s,
    }


# -- Prometheus


async def metrics_text(state: State, *, controller_up: bool) -> bytes:
    """Series of this gateway, all its workers together."""
    up = _gauge("controller_up", "Whether the controller answered this scrape.", int(controller_up))
    texts, own = [await _series(state, up)], _snapshot(state, state.config.name)
    for path in sorted(own.parent.glob(_snapshot(state, "*").name)):
        with contextlib.suppress(OSError):
            if path != own and time.time() - path.stat().st_mtime < STALE_S:
                texts.append(path.read_text())
    return joined(texts)


async def write_snapshot(state: State) -> None:
    """Replace this worker's snapshot. A full disk loses a snapshot, nothing else."""
    text = await _series(state)
    with contextlib.suppress(OSError):
        replace_file(_snapshot(state, state.config.name), text.encode())


def _snapshot(state: State, worker: str) -> Path:
    return Path(f"{state.config.bus_socket}.{worker}.metrics")


def joined(texts: Iterable[str]) -> bytes:
    """One text of several: the samples of one name are together, as the format requires."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in f"\n{text.rstrip()}".split("\n# HELP ")[1:]:
            about, kind, *samples = family.split("\n")
            families.setdefault(f"# HELP {about}\n{kind}", []).extend(samples)
    return "".join("\n".join((head, *samples)) + "\n" for head, samples in families.items()).encode()


async def _series(state: State, *more: Metric) -> str:
    """Text of this worker's series and of `more`, with the label `worker` where there are several workers."""
    current, worker = [*gauges(state), *more], {"worker": state.config.name} if state.config.workers > 1 else {}

    def text() -> str:
        families = [*current, *state.metrics.registry.collect()]
        for family in families:
            family.samples = [sample._replace(labels=worker | sample.labels) for sample in family.samples]
        collected: Any = SimpleNamespace(collect=lambda: families)
        return generate_latest(collected).decode()

    return await asyncio.to_thread(text)  # it may take 0.3 s


def gauges(state: State) -> Iterator[Metric]:
    """Current values, and the counts of events."""
    events = CounterMetricFamily("appliance_gateway_events", "Things that happened to requests.", labels=["event"])
    for event, count in sorted(state.metrics.events.items()):
        events.add_metric([event], count)
    yield events
    yield _gauge("gateway_connections", "Open client connections.", len(state.connections))
    yield _gauge("gateway_table_generation", "Routing table in force, -1 before the first.", state.generation)
    yield _gauge("gateway_buffered_body_bytes", "Request bodies in memory.", state.buffered_bytes)
    yield _gauge("gateway_start_time_seconds", "Unix time of the start.", state.started_s)
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
