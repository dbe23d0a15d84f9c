"""Defines the record of one client request, from its head to the end of its answer, that all higher packages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.gateway.access.allowance import KeyUse, OwnerUse
from appliance.gateway.answers.usage import Tokens
from appliance.gateway.core.routes import UNKNOWN, Route
from appliance.gateway.routing.table import NOBODY, Caller

Headers = Mapping[bytes, bytes]
Pairs = Sequence[tuple[bytes, bytes]]

_NOBODYS = KeyUse(OwnerUse())


class Request:
    """One request. Times by the monotonic clock.

    received_s: when its head came, of inference its body (complete_s). sent_s: when an engine got it last. row: of the
    table, by which it was placed. replica, model_version: where it is or was last; the version as the engine names it,
    once it answers. stream_events: events relayed. trace: its W3C traceparent, empty without one. prompt_tokens:
    estimated; charged: tokens taken from its key's allowance and counted against its quota while it is open; tokens:
    its cost as the engine reported it. counted: as open, streams: as a stream. rate_headers: about
    its key's allowance; more_headers: of its API; ignored: name the parts of it that an
    engine does not get. head_only: its answer has no body. refused_model: the model it named, once known to exist.
    session: the login of the page that it came by, empty for a key. spans: its `RequestSpans` (observe/tracing.py),
    only if traces are exported.
    """

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes] | None = None) -> None:
        self.method, self.headers = method, headers or {}
        self.set_target(target)
        length = self.headers.get(b"content-length")
        self.content_length = None if length is None else int(length)
        self.chunked = b"transfer-encoding" in self.headers
        self.route: Route = UNKNOWN
        self.caller: Caller = NOBODY
        self.use: KeyUse = _NOBODYS
        self.request_id = self.trace = b""
        self.received_s = self.complete_s = self.sent_s = self.first_byte_s = 0.0
        self.body_bytes = self.buffered_bytes = self.sent_bytes = self.stream_events = 0
        self.status = self.prompt_tokens = self.charged = 0
        self.model = self.row = self.model_version = self.replica = self.refused_model = self.session = ""
        self.rate_headers: Pairs = ()
        self.more_headers: Pairs = ()
        self.ignored: Pairs = ()
        self.head_only = self.counted = self.streams = False
        self.tokens = Tokens()
        self.spans: Any = None

    def set_target(self, target: bytes) -> None:
        """target: path and query."""
        self.target = target
        self.path = target.partition(b"?")[0]

    @property
    def answer_headers(self) -> Pairs:
        """Headers of any answer to it, refused or not."""
        return [*self.rate_headers, *self.more_headers, *self.ignored]

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
