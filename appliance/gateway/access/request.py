"""One client request, from its head to the end of its answer, what its key may spend, and what it cost. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from appliance.gateway.core.routes import UNKNOWN, Route
from appliance.gateway.core.table import NOBODY, Caller

Headers = Mapping[bytes, bytes]
Pairs = Sequence[tuple[bytes, bytes]]

# Inside a JSON string a quote is always escaped, so these match the engine's own fields and never a client's text.
# Answers of /v1/responses have more of the request than its texts (the schemas of its tools): requests/transcript.py.
USAGE: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage": ?\{')
# All counts in one pass: four searches took 1.8 times as long.
_COUNTS: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens": ?([0-9]{1,12})'
)
_MINUTE_S: Final = 60.0
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}


class Tokens:
    """Usage of one request. The newest number counts: Anthropic's streams report the prompt first and the completion
    last. cached: tokens of the prompt that a cache of prefixes had."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def read(self, body: bytes) -> None:
        """Take the usage from a piece of an answer, if it holds one."""
        starts = list(_USAGE.finditer(body))
        if not starts:
            return
        counts: dict[bytes, int] = {}
        for name, digits in _COUNTS.findall(body, starts[-1].end()):
            counts.setdefault(_NAMES.get(name, name), int(digits))  # the first of each is the engine's own
        self.cached = counts.get(b"cached", self.cached)
        if b"prompt" in counts:
            # Anthropic's `input_tokens` are those that no cache had.
            self.prompt = sum(counts.get(name, 0) for name in (b"prompt", b"cache_read_input", b"cache_creation_input"))
        self.completion = counts.get(b"completion", self.completion)


class Bucket:
    """`limit` per minute, refilled evenly, a minute's worth at once; `level` may be negative after a request that cost
    more than estimated."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is available; an amount larger than the bucket needs a full one."""
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / _MINUTE_S)
        self._at_s = now_s
        return max(0.0, min(amount, self.limit) - self.level) * _MINUTE_S / self.limit


class OwnerUse:
    """Open work of all keys of one owner: requests (streams among them) and bytes of bodies. Ten keys do not allow ten
    times as much."""

    requests: int = 0
    streams: int = 0
    body_bytes: int = 0


class KeyUse:
    """One key's requests of class batch, or all others of it: the buckets of its limits, its owner's open work, and
    under_way, the tokens that its open requests may take. A request takes its estimated tokens, and its cost corrects
    them later."""

    def __init__(self, owner: OwnerUse, batch: bool = False) -> None:
        self.owner, self.batch = owner, batch
        self.under_way = 0
        self.buckets: dict[str, Bucket] = {}
        self._limits: tuple[int | None, int | None] = (None, None)

    def limit(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        """None: no limit. Other limits than before begin with full buckets."""
        limits = requests_per_minute, tokens_per_minute
        if limits != self._limits:
            self._limits = limits
            named = zip(("requests", "tokens"), limits, strict=True)
            self.buckets = {name: Bucket(limit, now_s) for name, limit in named if limit is not None}

    def take(self, requests: int, tokens: int, now_s: float) -> tuple[str, int, float] | None:
        """Spend this, or nothing at all. Returns the exhausted bucket's name, limit and seconds to wait; a bucket in
        debt refuses whatever is taken."""
        for name, bucket in self.buckets.items():
            if wait_s := bucket.wait_s(requests if name == "requests" else tokens, now_s):
                return name, bucket.limit, wait_s
        self.spend(requests, tokens)
        return None

    def spend(self, requests: int, tokens: int) -> None:
        """Spend this even if it is not available; a negative number is a refund."""
        for name, bucket in self.buckets.items():
            bucket.level = min(bucket.limit, bucket.level - (requests if name == "requests" else tokens))

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Headers of https://platform.openai.com/docs/guides/rate-limits."""
        fields = []
        for name, bucket in self.buckets.items():
            reset = duration(bucket.wait_s(bucket.limit, now_s))
            values = {"limit": b"%d" % bucket.limit, "remaining": b"%d" % max(0, int(bucket.level)), "reset": reset}
            fields += [(f"x-ratelimit-{field}-{name}".encode(), value) for field, value in values.items()]
        return fields


def duration(seconds: float) -> bytes:
    """A duration in OpenAI's format: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else f"{round(rest, 2):g}s".encode()


_NO_USE: Final = KeyUse(OwnerUse())


class Request:
    """One request. Times by the monotonic clock.

    received_s: when its head came, of inference its body. sent_s: when an engine got it last. routed_model: name in
    the table by which it was placed, the model's or its canary's. replica, model_version: where it is or was last; the
    version as the engine names it, once it answers. stream_events: events relayed. trace: its W3C traceparent, empty
    without one. prompt_tokens: estimated; charged: tokens taken from its key's allowance and counted against its quota
    while it is open; tokens: its cost as the engine reported it. counted: as open, streams: as a stream. rate_headers:
    about its key's allowance; ignored: name the parts of it that an engine does not get.
    head_only: its answer has no body. refused_model: the model it named, once known to exist. session: the login
    of the page that it came by, empty for a key. broke_off: an error followed its answer's head. span: OpenTelemetry's,
    if traces are exported.
    """

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes] | None = None) -> None:
        """target: path and query."""
        self.method, self.target, self.headers = method, target, headers or {}
        self.path = target.partition(b"?")[0]
        length = self.headers.get(b"content-length")
        self.content_length = None if length is None else int(length)
        self.chunked = b"transfer-encoding" in self.headers
        self.route: Route = UNKNOWN
        self.caller: Caller = NOBODY
        self.use: KeyUse = _NO_USE
        self.request_id = self.trace = b""
        self.received_s = self.sent_s = self.first_byte_s = 0.0
        self.body_bytes = self.buffered_bytes = self.sent_bytes = self.stream_events = 0
        self.status = self.prompt_tokens = self.charged = 0
        self.model = self.routed_model = self.model_version = self.replica = self.refused_model = self.session = ""
        self.rate_headers: Pairs = ()
        self.ignored: Pairs = ()
        self.head_only = self.counted = self.streams = self.broke_off = False
        self.tokens = Tokens()
        self.span: Any = None

    @property
    def trace_id(self) -> str:
        """The second field of its traceparent, empty without one."""
        return self.trace[3:35].decode()

    @property
    def ids(self) -> dict[str, str]:
        """Fields for its log lines (runtime.logs)."""
        return {
            "request_id": self.request_id.decode(),
            "key_id": self.caller.id,
            "model": self.model,
            "version": self.model_version,
            "replica": self.replica,
            "trace_id": self.trace_id,
        }
