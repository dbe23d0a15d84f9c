"""Keeps the Prometheus counters and histograms of one gateway process, and its access log: one JSON object per request
and line."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from appliance.gateway.access.load import ModelLoad
from appliance.gateway.access.request import Request
from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from runtime.logs import timestamp

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ADDED_SECONDS: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
REQUEST_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MOST_SERIES: Final = 128
"""Triples of model, version and key class per process; beyond this the oldest is dropped. Rendering one takes 2 ms."""
_LABELS: Final = ("model", "version", "key_class")

disable_created_metrics()


class Metrics:
    """All counts of one process. Times in seconds.

    events: things that happened to requests, by kind. loads: by model of the routing table. series: by model, version
    and key class, the oldest first: what is counted of their requests, by name.
    """

    def __init__(self) -> None:
        self.events: defaultdict[str, int] = defaultdict(int)
        self.loads: defaultdict[str, ModelLoad] = defaultdict(ModelLoad)
        self.series: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("requests", "Requests answered, by route and status.", "route", "status")
        self.added = histogram("added", "From complete request to its sending upstream, unheld.", ADDED_SECONDS)
        self.held_for = histogram("held", "Time held requests waited for a replica.", SECONDS)
        text = "Inference requests ended, by model, version, key class and status."
        self._answered = counter("model_requests", text, *_LABELS, "status")
        text = "Tokens of prompts (input) and answers (output), as engines counted them."
        self._tokens = counter("tokens", text, *_LABELS, "direction")
        text = "Tokens of prompts in an engine's cache of prefixes."
        self._of_series = {
            "cached": counter("cached_tokens", text, *_LABELS),
            "first_byte": histogram(
                "time_to_first_byte", "From complete request to the first body byte.", SECONDS, *_LABELS
            ),
            "duration": histogram(
                "request", "From complete request to the end of its answer.", REQUEST_SECONDS, *_LABELS
            ),
        }
        text = "Streams: mean time from one token to the next."
        self._per_token = histogram("time_per_output_token", text, SECONDS, *_LABELS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"appliance_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        name = f"appliance_gateway_{name}_seconds"
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def first_byte(self, request: Request, now_s: float) -> None:
        """Record that the first byte of an engine's answer to this request goes out now."""
        self._series(request)["first_byte"].observe(now_s - request.received_s)

    def finished(self, request: Request, now_s: float) -> None:
        """Count a finished response, whichever side ended it."""
        self.requests.labels(request.route.name, request.status).inc()
        if not request.model:
            return
        series, tokens, token_s = self._series(request), request.tokens, None
        self._answered.labels(*series["labels"], request.status).inc()
        series["duration"].observe(now_s - request.received_s)
        series["input"].inc(tokens.prompt)
        series["output"].inc(tokens.completion)
        if tokens.cached:
            series["cached"].inc(tokens.cached)
        # One event may carry several tokens: use their number if the engine reported it.
        written = tokens.completion or request.stream_events
        if request.stream_events and written > 1:
            token_s = (now_s - request.first_byte_s) / (written - 1)
            self._per_token.labels(*series["labels"]).observe(token_s)
        self.loads[request.routed_model].finished(request, token_s, now_s)

    def forget_models(self, keep: Collection[str]) -> None:
        """Drop the load of models that left the table."""
        for name in [name for name in self.loads if name not in keep]:
            del self.loads[name]

    def _series(self, request: Request) -> dict[str, Any]:
        """What is counted of requests like this one; makes room for new ones."""
        key = request.model, request.model_version, key_class(request.caller.scopes)
        if key not in self.series:
            if len(self.series) >= MOST_SERIES:
                oldest = next(iter(self.series))
                del self.series[oldest]
                for metric in (self._answered, self._tokens, self._per_token, *self._of_series.values()):
                    metric.remove_by_labels(dict(zip(_LABELS, oldest, strict=True)))
            made = {name: metric.labels(*key) for name, metric in self._of_series.items()}
            made |= {way: self._tokens.labels(*key, way) for way in ("input", "output")}
            self.series[key] = {"labels": key, **made}
        return self.series[key]


def key_class(scopes: frozenset[str]) -> str:
    """The known scopes of a key, joined: at most eight values, however many keys exist."""
    return "+".join(scope for scope in (INFERENCE, FINE_TUNING, ADMIN) if scope in scopes) or "none"


# -- the access log

# Names that people give keys, often their own: a person who is forgotten leaves none here. Ids of keys stay.
_NAMED: Final = re.compile(rb"(/keys/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


class AccessLog:
    """Appends to `path`, a file of mode 0600; None: keeps nothing. A full disk costs lines, never requests."""

    def __init__(self, path: str | None) -> None:
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, request: Request, now_s: float) -> None:
        """Write a request's line when its response ends, at `now_s` by the monotonic clock.

        ttft_s, duration_s: from the complete request to the first body byte and to the end. Fields without a value are
        null.
        """
        if self._file < 0:
            return
        received_s, first_byte_s, caller = request.received_s or now_s, request.first_byte_s, request.caller
        fields = {
            "time": timestamp(time.time()),
            "level": "info",
            "process": "gateway",
            "event": "request",
            "request_id": request.request_id.decode("latin-1"),
            "key_id": caller.id or None,
            "method": "HEAD" if request.head_only else request.method.decode("latin-1"),
            "path": _NAMED.sub(rb"\1*", request.path)[:256].decode("latin-1"),
            "model": request.model or None,
            "version": request.model_version or None,
            "replica": request.replica or None,
            "status": request.status,
            "ttft_s": round(first_byte_s - received_s, 6) if first_byte_s else None,
            "duration_s": round(now_s - received_s, 6),
            "prompt_tokens": request.tokens.prompt,
            "completion_tokens": request.tokens.completion,
            "in_bytes": request.body_bytes,
            "out_bytes": request.sent_bytes,
            "trace_id": request.trace_id or None,
        }
        with contextlib.suppress(OSError):
            os.write(self._file, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
