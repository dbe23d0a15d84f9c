"""Counts and times requests for Prometheus, for the load report (by model, and by version of a model with a canary)
and for the access log."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from statistics import median
from typing import Any, Final

import orjson
import prometheus_client as prometheus

from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from appliance.gateway.core.table import Model, bucket
from appliance.gateway.requests.request_check import Checked
from appliance.gateway.server.exchange import Exchange

prometheus.disable_created_metrics()

# Limit of triples of model, version and key class; one more resets all series. Rendering a triple takes 2 ms.
MOST_SERIES: Final = 128
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ADDED: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_LONG: Final = (*_SECONDS[3:], 120.0, 300.0, 600.0)

# Bounds on the samples of the load report.
RECENT_S: Final = 60.0
_COMPUTED_TOKENS: Final = 1e6  # after this many prompt tokens, earlier tokens count half
_STREAMS: Final = 48  # the prefill rate uses this many of the latest streams
LEAST_SAMPLES: Final = 12
_TELLING: Final = 1.2  # long prompts must take at least this many times as long as short ones


class Metrics:
    """All counts. events: numbers of request events by kind. loads: loads by model of the table. series: triples of
    model, version and key class that have series. Other fields: Prometheus metrics, called with label values."""

    def __init__(self) -> None:
        self.events = Counter[str]()
        self.loads: defaultdict[str, ModelLoad] = defaultdict(ModelLoad)
        self.series = set[tuple[str, str, str]]()
        self.registry, self._by_series = prometheus.CollectorRegistry(), list[Any]()
        own: Any = {"namespace": "appliance_gateway", "registry": self.registry}

        def by_series(kind: type[Any], name: str, text: str, *labels: str, **more: Any) -> Any:
            metric = kind(name, text, ("model", "version", "key_class", *labels), **own, **more)
            labelled = cache(metric.labels)  # `labels` is slow: it takes a lock, ten times per request
            self._by_series += [metric.clear, labelled.cache_clear]
            return labelled

        text = "Requests answered, by route and status."
        self.requests = cache(prometheus.Counter("requests", text, ("route", "status"), **own).labels)
        text = "From the complete request to its sending to an engine, without held requests."
        self.added = prometheus.Histogram("added_seconds", text, buckets=_ADDED, **own)
        self.model_requests = by_series(prometheus.Counter, "model_requests", "Inference requests ended.", "status")
        self.tokens = by_series(prometheus.Counter, "tokens", "Tokens, as engines reported them.", "direction")
        self.cached = by_series(prometheus.Counter, "cached_tokens", "Prompt tokens found in an engine's prefix cache.")
        text = "From the complete request to the first byte of the answer's body."
        self.first_byte = by_series(prometheus.Histogram, "time_to_first_byte_seconds", text, buckets=_SECONDS)
        text = "From the complete request to the end of its answer."
        self.request = by_series(prometheus.Histogram, "request_seconds", text, buckets=_LONG)
        text = "Streams: mean time from one token to the next."
        self.token = by_series(prometheus.Histogram, "time_per_output_token_seconds", text, buckets=_SECONDS)

    def finished(self, exchange: Exchange, now_s: float, checked: Checked | None) -> None:
        """Count a request that ended, by client or server. checked: the body of a request for an engine."""
        self.requests(exchange.route.name, exchange.status).inc()
        if checked is None:
            return
        key, tokens = self.series_of(exchange), exchange.tokens
        self.model_requests(*key, exchange.status).inc()
        self.request(*key).observe(now_s - exchange.received_s)
        self.tokens(*key, "input").inc(tokens.prompt)
        self.tokens(*key, "output").inc(tokens.completion)
        self.cached(*key).inc(tokens.cached)
        load = self.loads[exchange.routed_model]
        if tokens.prompt and checked.prompt_tokens:
            load.computed(checked.prompt_tokens, max(tokens.prompt - tokens.cached, 0))
        # An event may have several tokens, so prefer the number of tokens that the engine reported.
        written = tokens.completion or exchange.stream_events
        if exchange.stream_events and written > 1:
            token_s = (now_s - exchange.first_byte_s) / (written - 1)
            self.token(*key).observe(token_s)
            load.tpot.append((time.time(), token_s))

    def series_of(self, exchange: Exchange) -> tuple[str, str, str]:
        """Return the request's labels; reset all series if there are too many. The key class is the key's known scopes,
        so it has at most eight values."""
        key = exchange.model, exchange.model_version, _key_class(exchange.caller.scopes)
        if key not in self.series:
            if len(self.series) >= MOST_SERIES:
                self.series.clear()
                for clear in self._by_series:
                    clear()
            self.series.add(key)
        return key

    def forget_arrivals(self) -> None:
        for load in self.loads.values():
            load.arrived_prompts.clear()


@cache
def _key_class(scopes: frozenset[str]) -> str:
    return "+".join(scope for scope in (INFERENCE, FINE_TUNING, ADMIN) if scope in scopes) or "none"


# -- for the load report


class ModelLoad:
    """Counts and recent times of one model since it entered the table. prefills: prompt tokens and seconds to the first
    byte, for streams that were alone on their replica. tpot: end (Unix time) and mean seconds per output token of ended
    streams."""

    def __init__(self) -> None:
        self._last_request_s: float | None = None
        self.arrived_prompts = Counter[int]()
        self._estimated = self._computed = 0.0
        self.tpot: deque[tuple[float, float]] = deque(maxlen=256)
        self.prefills: deque[tuple[int, float]] = deque(maxlen=_STREAMS)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """Count an admitted request."""
        self._last_request_s = now_s
        self.arrived_prompts[bucket(prompt_tokens, 1.0)] += 1

    def computed(self, estimated: int, tokens: int) -> None:
        """Count a prompt's tokens that an engine computed, without cached ones. estimated: by the router."""
        fade = 1.0 if self._estimated < _COMPUTED_TOKENS else 0.5
        self._estimated = self._estimated * fade + estimated
        self._computed = self._computed * fade + tokens

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the model's part of the load report; unknown values are None. tpot_p95_s: 95th percentile over streams
        that ended in the last minute. computed_part: computed prompt tokens per estimated one (fewer if prompts share a
        cached prefix). prefill_tokens_per_s: rate of one replica. arrived_prompts: number of requests since the last
        sent report, by `bucket` of their prompt tokens (from 1)."""
        recent = sorted(seconds for at_s, seconds in self.tpot if at_s >= now_s - RECENT_S)
        return {
            "last_request_s": self._last_request_s,
            "tpot_p95_s": recent[int(len(recent) * 0.95)] if recent else None,
            "computed_part": self._computed / self._estimated if self._estimated else None,
            "prefill_tokens_per_s": prefill_tokens_per_s(self.prefills),
            "arrived_prompts": self.arrived_prompts,
        }


def prefill_tokens_per_s(samples: Sequence[tuple[int, float]]) -> float | None:
    """Return tokens per second from (prompt tokens, seconds to first token) on idle replicas; None if undetermined.

    It is the slope of the resistant line through the outer thirds (Tukey 1977, "Exploratory Data Analysis", chapter 5):
    constant time cancels out, and single slow requests do not move a median. Tokens are the router's estimates, so the
    rate fits estimated tokens even if the estimates are biased."""
    if len(samples) < LEAST_SAMPLES:
        return None
    ordered, third = sorted(samples), len(samples) // 3
    short, long = (median(n for n, _ in part) for part in (ordered[:third], ordered[-third:]))
    short_s, long_s = (median(s for _, s in part) for part in (ordered[:third], ordered[-third:]))
    if long <= short or short_s <= 0 or long_s < _TELLING * short_s:
        return None
    return (long - short) / (long_s - short_s)


class Comparison:
    """Compares the versions of models with a canary. Each attempt counts for the version that got it, so a request that
    fails on the canary and succeeds elsewhere is an error of the canary, and so is a refusal. Disconnected clients do
    not count. canaries, as in the load report: {model: {"since_s", "versions": {version: {"requests", "errors",
    "first_byte", "duration"}}}}; the last two count successful requests by `bucket` of their seconds since sending."""

    def __init__(self) -> None:
        self.canaries: dict[str, dict[str, Any]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """Apply a table: start counts of new canaries at zero, drop counts of removed canaries."""
        before, self.canaries = self.canaries, {}
        for model in models:
            if model.canary is not None:
                new = {"since_s": model.canary.since_s, "versions": {}}
                known = before.get(model.name, new)
                self.canaries[model.name] = known if known["since_s"] == new["since_s"] else new

    def add(self, model: str, version: str, exchange: Exchange, *, failed: bool) -> None:
        """Count a finished attempt at a request for `model`."""
        if model not in self.canaries:
            return
        new = {"requests": 0, "errors": 0, "first_byte": Counter[int](), "duration": Counter[int]()}
        counts = self.canaries[model]["versions"].setdefault(version, new)
        counts["requests"] += 1
        counts["errors"] += failed
        if not failed and exchange.first_byte_s >= exchange.sent_s:  # false if another engine began the stream
            counts["first_byte"][bucket(exchange.first_byte_s - exchange.sent_s)] += 1
            counts["duration"][bucket(time.monotonic() - exchange.sent_s)] += 1


# A key's name is often a person's, and must not remain in a log; a key's id may remain.
_NAMED: Final = re.compile(rb"(/keys/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


def access_line(exchange: Exchange, now_s: float) -> bytes:
    """Return a line of JSON for a request whose response ended at `now_s` (monotonic clock). ttft_s: seconds from the
    complete request to the first body byte; duration_s: to the end."""
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
