"""Builds one gateway's load report for the controller, and its Prometheus text.

Each of several workers keeps a snapshot of its series beside the bus socket; the scraped one adds those of the others
to its own. Each series has the label `worker`, so that to Prometheus a restarted worker resets only its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.gateway.core.load import ModelLoad
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
    now_s, held, certificate = time.time(), state.holds.models(), state.certificate
    inflight, waiting, prompts = Counter[str](), Counter[str](), Counter[str]()
    for exchange in state.exchanges:
        work, checked, choice, model = exchange.work, exchange.checked, exchange.choice, exchange.routed_model
        if work is None or checked is None or work.batch:
            continue
        inflight[model] += 1
        prompts[model] += work.prompt_tokens
        if checked.stream:
            waiting[model] += work.prompt_tokens if choice is None else choice.pending
    models = {
        name: {
            "inflight": inflight[name] - held[name],
            "held": held[name],
            "waiting_prompt_tokens": waiting[name],
            "prompt_tokens": prompts[name],
            **(state.metrics.loads.get(name) or ModelLoad()).report(now_s),
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
        "notes": [] if certificate is None else certificate.notes(now_s),
        "certificate_expires_s": None if certificate is None else certificate.expires_s,
    }


# -- Prometheus


async def metrics_text(state: State, *, controller_up: bool) -> bytes:
    """Series of this gateway, all its workers together."""
    up = GaugeMetricFamily("appliance_controller_up", "Whether the controller answered this scrape.", controller_up)
    texts, own = [await _text(state, up)], _snapshot(state, state.config.name)
    for path in sorted(own.parent.glob(_snapshot(state, "*").name)):
        with contextlib.suppress(OSError):
            if path != own and time.time() - path.stat().st_mtime < STALE_S:
                texts.append(path.read_text())
    families: dict[str, list[str]] = {}  # the format requires that all samples of a name are together
    for text in texts:
        for one in f"\n{text.rstrip()}".split("\n# HELP ")[1:]:
            about, kind, *samples = one.split("\n")
            families.setdefault(f"# HELP {about}\n{kind}", []).extend(samples)
    return "".join("\n".join((head, *samples)) + "\n" for head, samples in families.items()).encode()


async def write_snapshot(state: State) -> None:
    """Replace this worker's snapshot. A full disk loses a snapshot, nothing else."""
    text = await _text(state)
    with contextlib.suppress(OSError):
        replace_file(_snapshot(state, state.config.name), text.encode())


def _snapshot(state: State, worker: str) -> Path:
    return Path(f"{state.config.bus_socket}.{worker}.metrics")


async def _text(state: State, *more: Metric) -> str:
    """Text of this worker's series and of `more`, with the label `worker` where there are several workers."""
    current, worker = [*gauges(state), *more], {"worker": state.config.name}

    def collect() -> Iterator[Metric]:
        for one in (*state.metrics.registry.collect(), *current):
            if state.config.workers > 1:
                one.samples = [sample._replace(labels=worker | sample.labels) for sample in one.samples]
            yield one

    collected: Any = SimpleNamespace(collect=collect)
    return (await asyncio.to_thread(generate_latest, collected)).decode()  # it may take 0.3 s


def gauges(state: State) -> Iterator[Metric]:
    """Series made of the current state."""
    certificate, named = state.certificate, "appliance_gateway_{}".format
    events = CounterMetricFamily(named("events"), "Things that happened to requests.", labels=("event",))
    for event, count in sorted(state.metrics.events.items()):
        events.add_metric((event,), count)
    yield events
    yield GaugeMetricFamily(named("start_time_seconds"), "Unix time of the start.", state.started_s)
    if certificate is not None:
        text = "Unix time at which the endpoint's certificate expires."
        yield GaugeMetricFamily("appliance_tls_expiry_seconds", text, certificate.expires_s)
    held = dict.fromkeys((model for model, _, _ in state.metrics.series), 0) | state.holds.models()
    loads = {name: load.inflight for name, load in state.router.loads.items()}
    failing = dict.fromkeys(state.background.names(), 1)
    for name, label, text, values in (
        ("held", "model", "Requests waiting for a replica.", held),
        ("inflight", "replica", "Requests on a replica.", loads),
        ("degraded", "part", "1 while a part of the gateway fails and is tried again.", failing),
    ):
        family = GaugeMetricFamily(named(name), text, labels=(label,))
        for value, number in values.items():
            family.add_metric((value,), number)
        yield family
