"""Counts what happens to requests: for Prometheus, for the load report (of a model, and of the versions of a model with
a canary), and as lines of the access log."""

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

# Triples of model, version and key class; beyond this all counts by them begin again. Rendering one takes 2 ms.
MOST_SERIES: Final = 128
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ADDED: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_LONG: Final = (*_SECONDS[3:], 120.0, 300.0, 600.0)

# For the load report.
RECENT_S: Final = 60.0
_COMPUTED_TOKENS: Final = 1e6  # prompt tokens after which those before count half
_STREAMS: Final = 48  # for the rate of prompts: so many new streams replace those of old engines and weights
LEAST_SAMPLES: Final = 12
_TELLING: Final = 1.2  # long prompts must take longer than short ones by this factor, else there is no rate


class Metrics:
    """All counts. events: things that happened to requests, by kind. loads: by model of the routing table. series:
    triples of model, version and key class. All others: by the values of their labels."""

    def __init__(self) -> None:
        self.events = Counter[str]()
        self.loads: defaultdict[str, ModelLoad] = defaultdict(ModelLoad)
        self.series = set[tuple[str, str, str]]()
        self.registry, self._by_series = prometheus.CollectorRegistry(), list[Any]()
        own: Any = {"namespace": "appliance_gateway", "registry": self.registry}

        def by_series(kind: type[Any], name: str, text: str, *labels: str, **more: Any) -> Any:
            metric = kind(name, text, ("model", "version", "key_class", *labels), **own, **more)
            labelled = cache(metric.labels)  # which takes a lock and compares names, ten times in each request
            self._by_series += [metric.clear, labelled.cache_clear]
            return labelled

        text = "Requests answered, by route and status."
        self.requests = cache(prometheus.Counter("requests", text, ("route", "status"), **own).labels)
        text = "From complete request to its sending upstream, unheld."
        self.added = prometheus.Histogram("added_seconds", text, buckets=_ADDED, **own)
        self.model_requests = by_series(prometheus.Counter, "model_requests", "Inference requests ended.", "status")
        self.tokens = by_series(prometheus.Counter, "tokens", "Tokens, as engines counted them.", "direction")
        self.cached = by_series(prometheus.Counter, "cached_tokens", "Tokens of prompts in an engine's prefix cache.")
        text = "From complete request to the first body byte."
        self.first_byte = by_series(prometheus.Histogram, "time_to_first_byte_seconds", text, buckets=_SECONDS)
        text = "From complete request to the end of its answer."
        self.request = by_series(prometheus.Histogram, "request_seconds", text, buckets=_LONG)
        text = "Streams: mean time from one token to the next."
        self.token = by_series(prometheus.Histogram, "time_per_output_token_seconds", text, buckets=_SECONDS)

    def finished(self, exchange: Exchange, now_s: float, checked: Checked | None) -> None:
        """Count a finished response, whichever side ended it. checked: the body, if it was for an engine."""
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
        # One event may carry several tokens: use their number if the engine reported it.
        written = tokens.completion or exchange.stream_events
        if exchange.stream_events and written > 1:
            token_s = (now_s - exchange.first_byte_s) / (written - 1)
            self.token(*key).observe(token_s)
            load.tpot.append((time.time(), token_s))

    def series_of(self, exchange: Exchange) -> tuple[str, str, str]:
        """The labels of requests like this one; makes room for new ones. Of its key they have the known scopes: at most
        eight values, however many keys exist."""
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
    """Counts and recent times of one model since it is in the table. prefills: prompt tokens and seconds to the first
    byte of streams that were alone on their replica. tpot: of streams that have ended, when, and their mean time from
    one token to the next. Times in seconds, moments in Unix time."""

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
        """Count the tokens of a prompt that an engine computed, not those of its cache. estimated: all its tokens."""
        fade = 1.0 if self._estimated < _COMPUTED_TOKENS else 0.5
        self._estimated = self._estimated * fade + estimated
        self._computed = self._computed * fade + tokens

    def report(self, now_s: float) -> dict[str, Any]:
        """This model's part of the load report. tpot_p95_s: of streams of the last minute. computed_part: prompt tokens
        that engines computed for an estimated one (fewer where prompts share a cached prefix). prefill_tokens_per_s: of
        one replica. None for what is unknown. arrived_prompts: requests since the last report that was sent, by
        `bucket` of their prompt tokens (from 1)."""
        recent = sorted(seconds for at_s, seconds in self.tpot if at_s >= now_s - RECENT_S)
        return {
            "last_request_s": self._last_request_s,
            "tpot_p95_s": recent[int(len(recent) * 0.95)] if recent else None,
            "computed_part": self._computed / self._estimated if self._estimated else None,
            "prefill_tokens_per_s": prefill_tokens_per_s(self.prefills),
            "arrived_prompts": self.arrived_prompts,
        }


def prefill_tokens_per_s(samples: Sequence[tuple[int, float]]) -> float | None:
    """Tokens per second from (prompt tokens, seconds to the first token) on idle replicas; None if undetermined.

    The slope of the resistant line through the outer thirds (Tukey 1977, "Exploratory Data Analysis", chapter 5): the
    part of the time that does not grow with the prompt drops out, and single slow ones move no median. Tokens are
    counted as routing estimates them; whatever its error, the work of the same estimate comes out right."""
    if len(samples) < LEAST_SAMPLES:
        return None
    ordered, third = sorted(samples), len(samples) // 3
    short, long = (median(n for n, _ in part) for part in (ordered[:third], ordered[-third:]))
    short_s, long_s = (median(s for _, s in part) for part in (ordered[:third], ordered[-third:]))
    if long <= short or short_s <= 0 or long_s < _TELLING * short_s:
        return None
    return (long - short) / (long_s - short_s)


class Comparison:
    """Every attempt counts for the version it was sent to, so a request that fails on the canary and succeeds on the
    other version is an error of the canary, and so is a refusal. Clients that leave count for none. canaries: {model:
    {"since_s", "versions": {version: {"requests", "errors", "first_byte", "duration"}}}}, the last two numbers of
    successful requests by bucket of their time from sending, as the load report has them."""

    def __init__(self) -> None:
        self.canaries: dict[str, dict[str, Any]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        before, self.canaries = self.canaries, {}
        for model in models:
            if model.canary is not None:
                new = {"since_s": model.canary.since_s, "versions": {}}
                known = before.get(model.name, new)
                self.canaries[model.name] = known if known["since_s"] == new["since_s"] else new

    def add(self, model: str, version: str, exchange: Exchange, *, failed: bool) -> None:
        """Count a finished attempt."""
        if model not in self.canaries:
            return
        new = {"requests": 0, "errors": 0, "first_byte": Counter[int](), "duration": Counter[int]()}
        counts = self.canaries[model]["versions"].setdefault(version, new)
        counts["requests"] += 1
        counts["errors"] += failed
        if not failed and exchange.first_byte_s >= exchange.sent_s:  # not of another engine that began its stream
            counts["first_byte"][bucket(exchange.first_byte_s - exchange.sent_s)] += 1
            counts["duration"][bucket(time.monotonic() - exchange.sent_s)] += 1


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
