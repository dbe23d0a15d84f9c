"""Counts what happens to requests in one gateway process, for Prometheus, and keeps its access log: one JSON object per
request and line."""

from __future__ import annotations

import contextlib
import os
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Final

import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from appliance.gateway.access.load import ModelLoad
from appliance.gateway.access.request import Request
from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from runtime.logs import timestamp

MOST_SERIES: Final = 128
"""Triples of model, version and key class per process; beyond this the oldest is dropped. Rendering one takes 2 ms."""
_SERIES: Final = ("model", "version", "key_class")
_COUNTERS: Final = {
    "events": (("event",), "Things that happened to requests."),
    "requests": (("route", "status"), "Requests answered, by route and status."),
    "model_requests": ((*_SERIES, "status"), "Inference requests ended, by model, version, key class and status."),
    "tokens": ((*_SERIES, "direction"), "Tokens of prompts (input) and answers (output), as engines counted them."),
    "cached_tokens": (_SERIES, "Tokens of prompts in an engine's cache of prefixes."),
}
"""Name -> labels, description."""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ADDED: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_LONG: Final = (*_SECONDS[3:], 120.0, 300.0, 600.0)
_TIMES: Final = {
    "added": ((), _ADDED, "From complete request to its sending upstream, unheld."),
    "held": ((), _SECONDS, "Time held requests waited for a replica."),
    "time_to_first_byte": (_SERIES, _SECONDS, "From complete request to the first body byte."),
    "request": (_SERIES, _LONG, "From complete request to the end of its answer."),
    "time_per_output_token": (_SERIES, _SECONDS, "Streams: mean time from one token to the next."),
}
"""Name -> labels, ends of its buckets in seconds, description."""
_KINDS: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Times:
    """A histogram of seconds. bounds: the ends of its buckets; another one has what is beyond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def sample(self) -> tuple[list[tuple[str, int]], float]:
        """Prometheus' buckets, each with all smaller ones, and the sum."""
        return list(zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True)), self._sum


class Metrics:
    """All counts of one process.

    events: things that happened to requests, by kind. loads: by model of the routing table. counts, times: by the names
    of the tables above, then by the values of their labels. series: model, version and key class of those that have
    counts, the oldest first.
    """

    def __init__(self) -> None:
        self.counts = {name: Counter[tuple[Any, ...]]() for name in _COUNTERS}
        self.times: dict[str, defaultdict[tuple[str, ...], Times]] = {
            name: defaultdict(partial(Times, bounds)) for name, (_, bounds, _) in _TIMES.items()
        }
        self.events: defaultdict[str, int] = defaultdict(int)
        self.loads: defaultdict[str, ModelLoad] = defaultdict(ModelLoad)
        self.series: dict[tuple[str, str, str], None] = {}

    def first_byte(self, request: Request, now_s: float) -> None:
        """Record that the first byte of an engine's answer to this request goes out now."""
        self.times["time_to_first_byte"][self._key(request)].add(now_s - request.received_s)

    def finished(self, request: Request, now_s: float) -> None:
        """Count a finished response, whichever side ended it."""
        counts = self.counts
        counts["requests"][request.route.name, request.status] += 1
        if not request.model:
            return
        key, tokens, token_s = self._key(request), request.tokens, None
        counts["model_requests"][*key, request.status] += 1
        self.times["request"][key].add(now_s - request.received_s)
        counts["tokens"][*key, "input"] += tokens.prompt
        counts["tokens"][*key, "output"] += tokens.completion
        counts["cached_tokens"][key] += tokens.cached
        # One event may carry several tokens: use their number if the engine reported it.
        written = tokens.completion or request.stream_events
        if request.stream_events and written > 1:
            token_s = (now_s - request.first_byte_s) / (written - 1)
            self.times["time_per_output_token"][key].add(token_s)
        self.loads[request.routed_model].finished(request, token_s, now_s)

    def forget_models(self, keep: Collection[str]) -> None:
        """Drop the load of models that left the table."""
        for name in [name for name in self.loads if name not in keep]:
            del self.loads[name]

    def _key(self, request: Request) -> tuple[str, str, str]:
        """The series that counts requests like this one; makes room for a new one."""
        key = request.model, request.model_version, key_class(request.caller.scopes)
        if key not in self.series:
            if len(self.series) >= MOST_SERIES:
                oldest = next(iter(self.series))
                del self.series[oldest]
                counted: list[dict[Any, Any]] = [*self.counts.values(), *self.times.values()]
                for rows in counted:
                    for labels in [labels for labels in rows if labels[:3] == oldest]:
                        del rows[labels]
            self.series[key] = None
        return key

    def families(self) -> Iterator[Metric]:
        """Of Prometheus' text."""
        self.counts["events"] = Counter({(event,): count for event, count in self.events.items()})
        for name, (names, text) in _COUNTERS.items():
            yield family("counter", name, text, names, sorted(self.counts[name].items()))
        for name, (names, _, text) in _TIMES.items():
            rows = [(labels, times.sample()) for labels, times in self.times[name].items()]
            yield family("histogram", f"{name}_seconds", text, names, rows)


def family(kind: str, name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[Any, Any]]) -> Metric:
    """One family of series. kind: of `_KINDS`. rows: values of the labels, and the value, or a `Times.sample`."""
    made: Metric = _KINDS[kind](f"appliance_gateway_{name}", text, labels=labels)
    for values, value in rows:
        made.add_metric([str(one) for one in values], *(value if isinstance(value, tuple) else (value,)))  # type: ignore[attr-defined]
    return made


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
