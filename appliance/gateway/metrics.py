"""Counters and histograms of one gateway process in Prometheus' text format 0.0.4.

Own and small because it sits on the hot path: one dict update per event instead of a lock and a label lookup.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterable

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ADDED_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
RECENT_TTFT = 256
RECENT_S = 60.0


class Histogram:
    """Counts by bucket upper bound (seconds), sum and number."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str = "") -> Iterable[str]:
        """Exposition lines; labels: 'a="x",' with its trailing comma, or empty."""
        running = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            running += count
            yield f'{name}_bucket{{{labels}le="{bound}"}} {running}'
        running += self.counts[-1]
        yield f'{name}_bucket{{{labels}le="+Inf"}} {running}'
        plain = _braces(labels.rstrip(","))
        yield f"{name}_sum{plain} {self.total:.9f}"
        yield f"{name}_count{plain} {running}"


class Metrics:
    """All of one gateway. Times in seconds."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.events: defaultdict[str, int] = defaultdict(int)
        self.added = Histogram(ADDED_SECONDS)
        self.held_for = Histogram(SECONDS)
        self.ttft: dict[tuple[str, str], Histogram] = {}
        self.response_bytes = 0
        self.last_request_s: dict[str, float] = {}
        self._recent: dict[str, deque[tuple[float, float]]] = {}

    def observe_ttft(self, model: str, version: str, seconds: float, now_s: float) -> None:
        key = (model, version)
        histogram = self.ttft.get(key)
        if histogram is None:
            histogram = self.ttft[key] = Histogram(SECONDS)
            self._recent.setdefault(model, deque(maxlen=RECENT_TTFT))
        histogram.observe(seconds)
        self._recent[model].append((now_s, seconds))

    def ttft_p95_s(self, model: str, now_s: float) -> float | None:
        """95th percentile of the time to first byte over the last minute (at most 256 requests), None without any."""
        recent = self._recent.get(model)
        if not recent:
            return None
        values = sorted(seconds for at, seconds in recent if at >= now_s - RECENT_S)
        return values[min(len(values) - 1, int(len(values) * 0.95))] if values else None

    def forget_models(self, keep: Iterable[str]) -> None:
        """Drop series of models that left the table, so that label sets stay bounded."""
        kept = set(keep)
        self.ttft = {key: histogram for key, histogram in self.ttft.items() if key[0] in kept}
        self._recent = {name: values for name, values in self._recent.items() if name in kept}
        self.last_request_s = {name: at for name, at in self.last_request_s.items() if name in kept}

    def render(self, gauges: Iterable[tuple[str, str, dict[str, str], float]]) -> bytes:
        """Prometheus text. gauges: (name, help, labels, value), rows of one name adjacent."""
        out: list[str] = []
        _head(out, "appliance_gateway_requests_total", "Requests answered, by route and status.", "counter")
        for (route, status), count in sorted(self.requests.items()):
            out.append(f'appliance_gateway_requests_total{{route="{route}",status="{status}"}} {count}')
        _head(out, "appliance_gateway_events_total", "Things that happened to requests, by kind.", "counter")
        for event, count in sorted(self.events.items()):
            out.append(f'appliance_gateway_events_total{{event="{event}"}} {count}')
        _head(out, "appliance_gateway_response_bytes_total", "Body bytes relayed to clients.", "counter")
        out.append(f"appliance_gateway_response_bytes_total {self.response_bytes}")
        for name, text, histogram in (
            ("appliance_gateway_added_seconds", "From complete request to its sending upstream, unheld.", self.added),
            ("appliance_gateway_held_seconds", "Time held requests waited for a replica.", self.held_for),
        ):
            _head(out, name, text, "histogram")
            out.extend(histogram.lines(name))
        name = "appliance_gateway_time_to_first_byte_seconds"
        _head(out, name, "From complete request to the first body byte, by model and version.", "histogram")
        for (model, version), histogram in sorted(self.ttft.items()):
            out.extend(histogram.lines(name, f'model="{_escape(model)}",version="{_escape(version)}",'))
        previous = ""
        for name, text, labels, value in gauges:
            if name != previous:
                _head(out, name, text, "gauge")
                previous = name
            pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            out.append(f"{name}{_braces(pairs)} {value}")
        return ("\n".join(out) + "\n").encode()


def _head(out: list[str], name: str, text: str, kind: str) -> None:
    out.append(f"# HELP {name} {text}")
    out.append(f"# TYPE {name} {kind}")


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
