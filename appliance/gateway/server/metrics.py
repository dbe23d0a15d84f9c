"""Counts what happens to requests in one gateway process, for Prometheus, and writes the lines of its access log."""

from __future__ import annotations

import collections
import re
import time
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from appliance.gateway.core.load import ModelLoad
from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from appliance.gateway.requests.request_check import Checked
from appliance.gateway.server.exchange import Exchange

disable_created_metrics()

MOST_SERIES: Final = 128
"""Triples of model, version and key class per process; beyond this the oldest is dropped. Rendering one takes 2 ms."""
_LABELS: Final = ("model", "version", "key_class")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ADDED: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_LONG: Final = (*_SECONDS[3:], 120.0, 300.0, 600.0)


class Metrics:
    """All counts of one process. events: things that happened to requests, by kind. loads: by model of the routing
    table. series: by model, version and key class, the oldest first. All others: by the values of their labels."""

    def __init__(self) -> None:
        self.events = collections.Counter[str]()
        self.loads: collections.defaultdict[str, ModelLoad] = collections.defaultdict(ModelLoad)
        self.series: dict[tuple[str, str, str], None] = {}
        self.registry, self._by_series = CollectorRegistry(), list[Counter | Histogram]()
        own: Any = {"namespace": "appliance_gateway", "registry": self.registry}

        def counter(name: str, text: str, *labels: str) -> Any:
            self._by_series.append(metric := Counter(name, text, (*_LABELS, *labels), **own))
            return cache(metric.labels)

        def times(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            self._by_series.append(metric := Histogram(name, text, _LABELS, buckets=buckets, **own))
            return cache(metric.labels)

        requests = Counter("requests", "Requests answered, by route and status.", ("route", "status"), **own)
        self.requests = cache(requests.labels)
        text = "From complete request to its sending upstream, unheld."
        self.added = Histogram("added_seconds", text, buckets=_ADDED, **own)
        text = "Inference requests ended, by model, version, key class and status."
        self.model_requests = counter("model_requests", text, "status")
        text = "Tokens of prompts (input) and answers (output), as engines counted them."
        self.tokens = counter("tokens", text, "direction")
        self.cached = counter("cached_tokens", "Tokens of prompts in an engine's cache of prefixes.")
        text = "From complete request to the first body byte."
        self.first_byte = times("time_to_first_byte_seconds", text, _SECONDS)
        self.request = times("request_seconds", "From complete request to the end of its answer.", _LONG)
        text = "Streams: mean time from one token to the next."
        self.token = times("time_per_output_token_seconds", text, _SECONDS)

    def finished(self, exchange: Exchange, now_s: float, inferred: Checked | None) -> None:
        """Count a finished response, whichever side ended it. inferred: the request, if it was for an engine."""
        self.requests(exchange.route.name, exchange.status).inc()
        if inferred is None:
            return
        key, tokens = self.series_of(exchange), exchange.tokens
        self.model_requests(*key, exchange.status).inc()
        self.request(*key).observe(now_s - exchange.received_s)
        self.tokens(*key, "input").inc(tokens.prompt)
        self.tokens(*key, "output").inc(tokens.completion)
        self.cached(*key).inc(tokens.cached)
        load = self.loads[exchange.routed_model]
        if tokens.prompt and inferred.prompt_tokens:
            load.computed(inferred.prompt_tokens, max(tokens.prompt - tokens.cached, 0))
        # One event may carry several tokens: use their number if the engine reported it.
        written = tokens.completion or exchange.stream_events
        if exchange.stream_events and written > 1:
            token_s = (now_s - exchange.first_byte_s) / (written - 1)
            self.token(*key).observe(token_s)
            load.paced(token_s, time.time())

    def series_of(self, exchange: Exchange) -> tuple[str, str, str]:
        """The labels of requests like this one; makes room for new ones. Of its key they have the known scopes: at most
        eight values, however many keys exist."""
        key = exchange.model, exchange.model_version, _key_class(exchange.caller.scopes)
        if key not in self.series:
            if len(self.series) >= MOST_SERIES:
                oldest = next(iter(self.series))
                del self.series[oldest]
                for metric in self._by_series:
                    metric.remove_by_labels(dict(zip(_LABELS, oldest, strict=True)))
                for labels in (
                    self.model_requests,
                    self.tokens,
                    self.cached,
                    self.first_byte,
                    self.request,
                    self.token,
                ):
                    labels.cache_clear()
            self.series[key] = None
        return key


@cache
def _key_class(scopes: frozenset[str]) -> str:
    return "+".join(scope for scope in (INFERENCE, FINE_TUNING, ADMIN) if scope in scopes) or "none"


# Names that people give keys, often their own: a person who is forgotten leaves none here. Ids of keys stay.
_NAMED: Final = re.compile(rb"(/keys/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


def access_line(exchange: Exchange, now_s: float) -> bytes:
    """One JSON object and a line's end, for a request whose response ends at `now_s` by the monotonic clock. ttft_s,
    duration_s: from the complete request to the first body byte and to the end."""
    received_s, first_byte_s = exchange.received_s or now_s, exchange.first_byte_s
    path = _NAMED.sub(rb"\1*", exchange.path) if b"/keys/" in exchange.path else exchange.path
    fields = {
        "time": datetime.now(UTC),
        "level": "info",
        "process": "gateway",
        "event": "request",
        **{name: value or None for name, value in exchange.ids.items()},
        "method": "HEAD" if exchange.head_only else exchange.method.decode("latin-1"),
        "path": path[:256].decode("latin-1"),
        "status": exchange.status,
        "ttft_s": round(first_byte_s - received_s, 6) if first_byte_s else None,
        "duration_s": round(now_s - received_s, 6),
        "prompt_tokens": exchange.tokens.prompt,
        "completion_tokens": exchange.tokens.completion,
        "in_bytes": exchange.body_bytes,
        "out_bytes": exchange.sent_bytes,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)
