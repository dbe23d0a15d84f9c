"""Counts what happens to requests in one gateway process, for Prometheus, and keeps its access log: one JSON object per
request and line."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import time
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from appliance.gateway.core.load import ModelLoad
from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from appliance.gateway.requests.request_check import Checked
from appliance.gateway.server.exchange import Exchange
from runtime.logs import timestamp

disable_created_metrics()

MOST_SERIES: Final = 128
"""Triples of model, version and key class per process; beyond this the oldest is dropped. Rendering one takes 2 ms."""
_LABELS: Final = ("model", "version", "key_class")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ADDED: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_LONG: Final = (*_SECONDS[3:], 120.0, 300.0, 600.0)


class Series(NamedTuple):
    """Counts of one model, version and key class."""

    first_byte: Histogram
    request: Histogram
    token: Histogram
    input: Counter
    output: Counter
    cached: Counter


class Metrics:
    """All counts of one process.

    events: things that happened to requests, by kind. loads: by model of the routing table. series: by model, version
    and key class, the oldest first.
    """

    def __init__(self) -> None:
        self.events = collections.Counter[str]()
        self.loads: collections.defaultdict[str, ModelLoad] = collections.defaultdict(ModelLoad)
        self.series: dict[tuple[str, str, str], Series] = {}
        self.registry = CollectorRegistry()
        own: Any = {"namespace": "appliance_gateway", "registry": self.registry}
        self.requests = Counter("requests", "Requests answered, by route and status.", ("route", "status"), **own)
        text = "Inference requests ended, by model, version, key class and status."
        self._model_requests = Counter("model_requests", text, (*_LABELS, "status"), **own)
        text = "Tokens of prompts (input) and answers (output), as engines counted them."
        self._tokens = Counter("tokens", text, (*_LABELS, "direction"), **own)
        self._cached = Counter("cached_tokens", "Tokens of prompts in an engine's cache of prefixes.", _LABELS, **own)
        text = "From complete request to its sending upstream, unheld."
        self.added = Histogram("added_seconds", text, buckets=_ADDED, **own)
        text = "From complete request to the first body byte."
        self._first_byte = Histogram("time_to_first_byte_seconds", text, _LABELS, buckets=_SECONDS, **own)
        text = "From complete request to the end of its answer."
        self._request = Histogram("request_seconds", text, _LABELS, buckets=_LONG, **own)
        text = "Streams: mean time from one token to the next."
        self._token = Histogram("time_per_output_token_seconds", text, _LABELS, buckets=_SECONDS, **own)

    def first_byte(self, exchange: Exchange, now_s: float) -> None:
        """Record that the first byte of an engine's answer to this request goes out now."""
        self._series(exchange).first_byte.observe(now_s - exchange.received_s)

    def finished(self, exchange: Exchange, now_s: float, asked: Checked | None) -> None:
        """Count a finished response, whichever side ended it. asked: what engines were asked for it."""
        self.requests.labels(exchange.route.name, exchange.status).inc()
        if asked is None:
            return
        series, tokens = self._series(exchange), exchange.tokens
        self._model_requests.labels(*_key(exchange), exchange.status).inc()
        series.request.observe(now_s - exchange.received_s)
        series.input.inc(tokens.prompt)
        series.output.inc(tokens.completion)
        series.cached.inc(tokens.cached)
        load = self.loads[exchange.routed_model]
        if tokens.prompt and asked.prompt_tokens:
            load.computed(asked.prompt_tokens, max(tokens.prompt - tokens.cached, 0))
        # One event may carry several tokens: use their number if the engine reported it.
        written = tokens.completion or exchange.stream_events
        if exchange.stream_events and written > 1:
            token_s = (now_s - exchange.first_byte_s) / (written - 1)
            series.token.observe(token_s)
            load.paced(token_s, time.time())

    def forget_models(self, keep: Collection[str]) -> None:
        """Drop the load of models that left the table."""
        for name in self.loads.keys() - set(keep):
            del self.loads[name]

    def _series(self, exchange: Exchange) -> Series:
        """The counts for requests like this one; makes room for new ones."""
        key = _key(exchange)
        if key not in self.series:
            if len(self.series) >= MOST_SERIES:
                oldest = next(iter(self.series))
                del self.series[oldest]
                for metric in (self._model_requests, self._tokens, self._cached, *self._histograms()):
                    metric.remove_by_labels(dict(zip(_LABELS, oldest, strict=True)))
            times = (metric.labels(*key) for metric in self._histograms())
            tokens = (self._tokens.labels(*key, direction) for direction in ("input", "output"))
            self.series[key] = Series(*times, *tokens, self._cached.labels(*key))
        return self.series[key]

    def _histograms(self) -> tuple[Histogram, Histogram, Histogram]:
        return self._first_byte, self._request, self._token


def _key(exchange: Exchange) -> tuple[str, str, str]:
    """The last one is of the known scopes of its key, joined: at most eight values, however many keys exist."""
    scopes = "+".join(scope for scope in (INFERENCE, FINE_TUNING, ADMIN) if scope in exchange.caller.scopes)
    return exchange.model, exchange.model_version, scopes or "none"


# -- the access log

# Names that people give keys, often their own: a person who is forgotten leaves none here. Ids of keys stay.
_NAMED: Final = re.compile(rb"(/keys/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


class AccessLog:
    """Appends to `path`, a file of mode 0600; None: keeps nothing. A full disk costs lines, never requests."""

    def __init__(self, path: str | None) -> None:
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, exchange: Exchange, now_s: float) -> None:
        """Write a request's line when its response ends, at `now_s` by the monotonic clock.

        ttft_s, duration_s: from the complete request to the first body byte and to the end. Fields without a value are
        null.
        """
        if self._file < 0:
            return
        received_s, first_byte_s = exchange.received_s or now_s, exchange.first_byte_s
        fields = {
            "time": timestamp(time.time()),
            "level": "info",
            "process": "gateway",
            "event": "request",
            **{name: value or None for name, value in exchange.ids.items()},
            "method": "HEAD" if exchange.head_only else exchange.method.decode("latin-1"),
            "path": _NAMED.sub(rb"\1*", exchange.path)[:256].decode("latin-1"),
            "status": exchange.status,
            "ttft_s": round(first_byte_s - received_s, 6) if first_byte_s else None,
            "duration_s": round(now_s - received_s, 6),
            "prompt_tokens": exchange.tokens.prompt,
            "completion_tokens": exchange.tokens.completion,
            "in_bytes": exchange.body_bytes,
            "out_bytes": exchange.sent_bytes,
        }
        with contextlib.suppress(OSError):
            os.write(self._file, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
