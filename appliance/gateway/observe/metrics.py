"""Keeps the counters and histograms of one gateway process.

Written for the hot path: one dict update per event instead of a lock and a label lookup.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Final

from appliance.gateway.access.request import Request
from appliance.gateway.core.routes import ADMIN, FINE_TUNING, INFERENCE
from appliance.gateway.observe.exposition import Family, labels, line
from appliance.gateway.routing import prefill_rate
from appliance.gateway.routing.canary_comparison import bucket

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ADDED_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RECENT_TTFT = 256
RECENT_S = 60.0
# Versions and key classes of one model: beyond this it drops the oldest series, so that swaps do not accumulate.
SERIES_PER_MODEL = 32
# For all models, at all workers together: the loop writes them every second, and those of all workers with each
# scrape. Beyond this the owner who has most loses the oldest. (A thousand names of one owner's checkpoints, each asked
# once, took 0.4 s of each scrape, and 512 at each of eight workers 0.8.)
SERIES = 512
# What a worker keeps however many they are.
LEAST_SERIES = 64


class Histogram:
    """Counts by bucket upper bound (seconds), sum and number."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        # Compiled, the loop is three times faster than a call of bisect, which cost 2 % of a plain request.
        bucket = 0
        for bound in self.bounds:
            if value <= bound:
                break
            bucket += 1
        self.counts[bucket] += 1
        self.total += value

    def lines(self, name: str, text: str = "") -> str:
        """text: labels of the series as `exposition.labels` writes them."""
        comma = f"{text}," if text else ""
        head = f'{name}_bucket{{{comma}le="'
        found: list[str] = []
        running = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            found.append(f'{head}{bound}"}} {running}')
        found.append(line(f"{name}_sum", text, round(self.total, 9)))
        found.append(line(f"{name}_count", text, running))
        return "\n".join(found)


class Series:
    """What is kept per model, version and key class. owner: whose key asked first. read, found, written: tokens of
    prompts, those of them that a cache of prefixes had, and of answers. told: its text for each family, or
    empty if something was counted since."""

    __slots__ = ("owner", "statuses", "ttft", "duration", "per_token", "read", "found", "written", "told")

    def __init__(self, owner: str = "") -> None:
        self.owner = owner
        self.told: list[str] = []
        self.statuses: defaultdict[int, int] = defaultdict(int)
        self.ttft = Histogram(SECONDS)
        self.duration = Histogram(REQUEST_SECONDS)
        self.per_token = Histogram(SECONDS)
        self.read = 0
        self.found = 0
        self.written = 0


class Arrivals:
    """Requests admitted for a row of the table; sizes: by bucket of their prompt tokens."""

    __slots__ = ("requests", "prompt_tokens", "sizes")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.sizes: dict[int, int] = {}


class Computed:
    """Sums over a model's requests that are over: prompt tokens as estimated, and those that engines computed."""

    estimated: float = 0.0
    computed: float = 0.0

    def add(self, estimated: int, computed: int) -> None:
        fade = 1.0 if self.estimated < _COMPUTED_MEMORY else 0.5
        self.estimated = self.estimated * fade + estimated
        self.computed = self.computed * fade + computed


Key = tuple[str, str, str]

_COMPUTED_MEMORY: Final = 1e6
"""Prompt tokens after which those before count half."""

# The bucket of each short prompt: computing its logarithm cost 5 % of a plain request.
_SIZES: Final[list[int]] = [bucket(tokens, 1.0) for tokens in range(4096)]


class Metrics:
    """All of one gateway. Times in seconds. worker: its name, a label of all its series; empty where it is alone.
    workers: how many tell their series together."""

    def __init__(self, worker: str = "", workers: int = 1) -> None:
        self._worker = labels({"worker": worker}) if worker else ""
        # By owner, oldest first.
        self._series_of: dict[str, dict[Key, None]] = {}
        self._series_count = 0
        self._most_series = max(LEAST_SERIES, SERIES // workers)
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.events: defaultdict[str, int] = defaultdict(int)
        self.added = Histogram(ADDED_SECONDS)
        self.held_for = Histogram(SECONDS)
        self.models: dict[str, dict[Key, Series]] = {}
        self.response_bytes = 0
        self._touched: set[str] = set()
        self._last_s: dict[str, float] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._first_tokens: dict[str, defaultdict[int, int]] = {}
        self._idle_starts: dict[str, deque[tuple[int, float]]] = {}
        self._prefill: dict[str, float | None] = {}
        self._computed: dict[str, Computed] = {}
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._recent_tpot: dict[str, deque[tuple[float, float]]] = {}
        self._classes: dict[frozenset[str], str] = {}
        self._known: dict[tuple[str, str, frozenset[str]], Series] = {}
        # Whichever was counted last: its series, model, version and its key's scopes.
        self._last: Series | None = None
        self._last_of, self._last_version = "", ""
        self._last_scopes: frozenset[str] = frozenset()

    def arrived(self, row: str, prompt_tokens: int, now_s: float) -> None:
        """Count a request admitted for this table row."""
        self._last_s[row] = now_s
        self._touched.add(row)
        arrivals = self._arrivals.get(row)
        if arrivals is None:
            arrivals = self._arrivals[row] = Arrivals()
        arrivals.requests += 1
        arrivals.prompt_tokens += prompt_tokens
        size = _SIZES[prompt_tokens] if prompt_tokens < len(_SIZES) else bucket(prompt_tokens, 1.0)
        sizes = arrivals.sizes
        sizes[size] = sizes.get(size, 0) + 1

    def take_touched(self) -> set[str]:
        """Models of which a request has come or ended since this was asked last."""
        touched, self._touched = self._touched, set()
        return touched

    def last_request_s(self, row: str, unix_offset_s: float) -> float | None:
        """Unix time of the last admitted request; unix_offset_s: Unix time minus the monotonic clock."""
        last_s = self._last_s.get(row)
        return None if last_s is None else last_s + unix_offset_s

    def arrivals(self, row: str) -> tuple[int, int]:
        """Requests and estimated prompt tokens admitted since this process began, or since the row came into the table
        again: reports name the rows that have left it, for readers take differences."""
        arrivals = self._arrivals.get(row)
        return (0, 0) if arrivals is None else (arrivals.requests, arrivals.prompt_tokens)

    def prompt_sizes(self, row: str) -> dict[str, int]:
        """The same requests by bucket of their prompt tokens (`canary_comparison.bucket`, from 1)."""
        arrivals = self._arrivals.get(row)
        return {} if arrivals is None else {str(key): number for key, number in arrivals.sizes.items()}

    def first_token(self, row: str, seconds: float) -> None:
        """Record when the first token of a stream came, from its complete request."""
        times = self._first_tokens.get(row)
        if times is None:
            times = self._first_tokens[row] = defaultdict(int)
        times[bucket(seconds)] += 1

    def first_tokens(self, row: str) -> dict[str, int]:
        """Streams by bucket of the time to their first token, since this process began."""
        return {str(key): number for key, number in self._first_tokens.get(row, {}).items()}

    def prefilled(self, row: str, prompt_tokens: int, seconds: float) -> None:
        """Record the time to first byte of a stream that was alone on its replica."""
        samples = self._idle_starts.get(row)
        if samples is None:
            samples = self._idle_starts[row] = deque(maxlen=prefill_rate.SAMPLES)
        samples.append((prompt_tokens, seconds))
        self._prefill.pop(row, None)

    def prefill_tokens_per_s(self, row: str) -> float | None:
        """Prompt tokens per second of one replica, None if the streams so far do not determine it."""
        if row not in self._prefill:
            self._prefill[row] = prefill_rate.prefill_tokens_per_s(self._idle_starts.get(row, ()))
        return self._prefill[row]

    def computed_part(self, model: str) -> float | None:
        """Prompt tokens that engines computed for one that was estimated: fewer where prompts share what a cache of
        prefixes has, and more or fewer where the estimate errs. None without answers that tell."""
        sums = self._computed.get(model)
        return None if sums is None else sums.computed / sums.estimated

    def first_byte(self, request: Request, now_s: float) -> None:
        """Record that the first byte of an engine's answer to this request goes out now."""
        seconds = now_s - request.received_s
        self._series(request).ttft.observe(seconds)
        _remember(self._recent, request.model, now_s, seconds)

    def finished(self, request: Request, now_s: float) -> None:
        """Count a finished response, whichever side ended it."""
        self.requests[request.route_name, request.status] += 1
        self.response_bytes += request.sent_bytes
        if request.model:
            self._touched.add(request.model)
            series = self._series(request)
            series.statuses[request.status] += 1
            series.duration.observe(now_s - request.received_s)
            series.read += request.tokens.prompt
            series.found += request.tokens.found
            series.written += request.tokens.completion
            # What another engine had computed and refused says nothing of this one.
            prompt = request.tokens.prompt - request.refused_prompt
            if prompt and request.asked.prompt_tokens:
                self._add_computed(request, prompt)
            if request.stream_events:
                # One event may carry several tokens: use their number if the engine reported it.
                tokens = request.tokens.completion - request.refused_completion or request.stream_events
                if tokens > 1:
                    seconds = (now_s - request.first_byte_s) / (tokens - 1)
                    series.per_token.observe(seconds)
                    _remember(self._recent_tpot, request.model, now_s, seconds)

    def _add_computed(self, request: Request, prompt: int) -> None:
        sums = self._computed.get(request.model)
        if sums is None:
            sums = self._computed[request.model] = Computed()
        sums.add(request.asked.prompt_tokens, max(prompt - request.tokens.found, 0))

    def _series(self, request: Request) -> Series:
        scopes = request.caller.scopes if request.caller is not None else frozenset()
        model, version = request.model, request.model_version
        series = self._last
        # An answer that comes whole is counted twice in a row: its first byte and its end.
        if series is None or self._last_scopes is not scopes or self._last_of != model or self._last_version != version:
            known = model, version, scopes
            series = self._known.get(known)
            if series is None:
                series = self._known[known] = self._new_or_known(request, scopes)
            self._last, self._last_of, self._last_version, self._last_scopes = series, model, version, scopes
        if series.told:
            series.told = []
        return series

    def _new_or_known(self, request: Request, scopes: frozenset[str]) -> Series:
        kind = self._classes.get(scopes)
        if kind is None:
            kind = self._classes[scopes] = key_class(scopes)
        key = (request.model, request.model_version, kind)
        of_model = self.models.get(request.model)
        if of_model is None:
            of_model = self.models[request.model] = {}
        series = of_model.get(key)
        if series is None:
            if len(of_model) >= SERIES_PER_MODEL:
                self._drop(next(iter(of_model)))
            elif self._series_count >= self._most_series:
                most = max(self._series_of, key=lambda one: len(self._series_of[one]))
                self._drop(next(iter(self._series_of[most])))
            owner = request.caller.owner if request.caller is not None else ""
            series = self.models.setdefault(request.model, of_model)[key] = Series(owner)
            self._series_of.setdefault(owner, {})[key] = None
            self._series_count += 1
        return series

    def _drop(self, key: Key) -> None:
        self._known.clear()
        self._last = None
        of_model = self.models[key[0]]
        owner = of_model.pop(key).owner
        if not of_model:
            del self.models[key[0]]
        of_owner = self._series_of[owner]
        del of_owner[key]
        if not of_owner:
            del self._series_of[owner]
        self._series_count -= 1

    def ttft_p95_s(self, model: str, now_s: float) -> float | None:
        """95th percentile of the time to first byte over the last minute (at most 256 requests), None without any."""
        return _p95(self._recent.get(model), now_s)

    def tpot_p95_s(self, model: str, now_s: float) -> float | None:
        """The same of streams' mean time from one event (token) to the next."""
        return _p95(self._recent_tpot.get(model), now_s)

    def forget_models(self, keep: Iterable[str]) -> None:
        """Drop what is kept of models that left the table, so that label sets and reports stay bounded."""
        kept = set(keep)
        for name in [name for name in self.models if name not in kept]:
            for key in list(self.models[name]):
                self._drop(key)
        self._known.clear()
        self._last = None
        self._recent = {name: values for name, values in self._recent.items() if name in kept}
        self._recent_tpot = {name: values for name, values in self._recent_tpot.items() if name in kept}
        self._last_s = {name: at for name, at in self._last_s.items() if name in kept}
        self._arrivals = {name: counts for name, counts in self._arrivals.items() if name in kept}
        self._first_tokens = {name: times for name, times in self._first_tokens.items() if name in kept}
        self._idle_starts = {name: samples for name, samples in self._idle_starts.items() if name in kept}
        self._computed = {name: sums for name, sums in self._computed.items() if name in kept}
        self._prefill = {name: rate for name, rate in self._prefill.items() if name in kept}

    def families(self, gauges: Iterable[tuple[str, str, dict[str, str], float]]) -> list[Family]:
        """Everything. gauges: (name, help, labels, value), rows of one name adjacent."""
        found = [
            self._counter(
                "appliance_gateway_requests_total",
                "Requests answered, by route and status.",
                [
                    ({"route": route, "status": str(code)}, count)
                    for (route, code), count in sorted(self.requests.items())
                ],
            ),
            self._counter(
                "appliance_gateway_events_total",
                "Things that happened to requests, by kind.",
                [({"event": event}, count) for event, count in sorted(self.events.items())],
            ),
            self._counter(
                "appliance_gateway_response_bytes_total", "Body bytes relayed to clients.", [({}, self.response_bytes)]
            ),
            self._histogram(
                "appliance_gateway_added_seconds", "From complete request to its sending upstream, unheld.", self.added
            ),
            self._histogram(
                "appliance_gateway_held_seconds", "Time held requests waited for a replica.", self.held_for
            ),
            *self._by_model(),
        ]
        for name, text, pairs, value in gauges:
            if found[-1].name != name:
                found.append(Family(name, "gauge", text, []))
            found[-1].lines.append(line(name, self._labels(pairs), value))
        return found

    def _labels(self, pairs: dict[str, str]) -> str:
        own, text = self._worker, labels(pairs)
        return f"{own},{text}" if own and text else own or text

    def _counter(self, name: str, text: str, samples: list[tuple[dict[str, str], int]]) -> Family:
        return Family(name, "counter", text, [line(name, self._labels(pairs), value) for pairs, value in samples])

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        return Family(name, "histogram", text, [histogram.lines(name, self._labels({}))])

    def _by_model(self) -> list[Family]:
        found = [Family(name, kind, text, []) for name, kind, text in _OF_MODELS]
        rows = sorted((row for of_model in self.models.values() for row in of_model.items()), key=lambda row: row[0])
        for key, series in rows:
            if not series.told:
                series.told = self._told(key, series)
            for family, lines in zip(found, series.told, strict=True):
                if lines:
                    family.lines.append(lines)
        return found

    def _told(self, key: Key, series: Series) -> list[str]:
        """The text of this series for each of `_OF_MODELS`."""
        model, version, kind = key
        text = self._labels({"model": model, "version": version, "key_class": kind})
        (answered, _, _), (counted, _, _), (cached, _, _), *timed = _OF_MODELS
        found = [
            "\n".join(
                line(answered, f'{text},status="{status}"', count) for status, count in sorted(series.statuses.items())
            ),
            "\n".join(
                line(counted, f'{text},direction="{direction}"', count)
                for direction, count in (("input", series.read), ("output", series.written))
            ),
            line(cached, text, series.found),
        ]
        for (name, _, _), histogram in zip(timed, (series.ttft, series.duration, series.per_token), strict=True):
            found.append(histogram.lines(name, text) if any(histogram.counts) else "")
        return found


_OF_MODELS: Final[list[tuple[str, str, str]]] = [
    (
        "appliance_gateway_model_requests_total",
        "counter",
        "Inference requests ended, by model, version, key class and status.",
    ),
    (
        "appliance_gateway_tokens_total",
        "counter",
        "Tokens of prompts (input) and answers (output), as engines counted them.",
    ),
    (
        "appliance_gateway_cached_tokens_total",
        "counter",
        "Tokens of prompts that engines had in their cache of prefixes.",
    ),
    (
        "appliance_gateway_time_to_first_byte_seconds",
        "histogram",
        "From complete request to the first body byte.",
    ),
    ("appliance_gateway_request_seconds", "histogram", "From complete request to the end of its answer."),
    (
        "appliance_gateway_time_per_output_token_seconds",
        "histogram",
        "Streams: mean time from one token to the next.",
    ),
]


def _remember(recent: dict[str, deque[tuple[float, float]]], model: str, now_s: float, seconds: float) -> None:
    values = recent.get(model)
    if values is None:
        values = recent[model] = deque(maxlen=RECENT_TTFT)
    values.append((now_s, seconds))


def _p95(recent: deque[tuple[float, float]] | None, now_s: float) -> float | None:
    values = sorted(seconds for at, seconds in recent or () if at >= now_s - RECENT_S)
    return values[min(len(values) - 1, int(len(values) * 0.95))] if values else None


def key_class(scopes: frozenset[str]) -> str:
    """The known scopes of a key, joined: at most eight values, however many keys exist."""
    return "+".join(scope for scope in (INFERENCE, FINE_TUNING, ADMIN) if scope in scopes) or "none"
