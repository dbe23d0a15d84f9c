"""Sends OpenTelemetry traces of inference requests over OTLP/HTTP. Imported only if an endpoint is set.

    request          from its complete head to the end of its answer; its parent is the client's `traceparent`
      hold           for as long as it waits for a replica
      attempt        one replica: from sending to its last byte or its failure; the engine gets this span as its parent

A thread of the SDK sends spans in batches; an unreachable collector loses spans and delays no request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from appliance.gateway.access.request import Request
from appliance.gateway.core.routes import MESSAGES, RESPONSES

EXPORT_TIMEOUT_S = 3.0
_W3C = TraceContextTextMapPropagator()
_FAILED = Status(StatusCode.ERROR)
# Operations by the name of a route; the others have no name in the conventions.
_OPERATIONS = {
    "chat.completions": "chat",
    "completions": "text_completion",
    RESPONSES: "chat",
    MESSAGES: "chat",
    "embeddings": "embeddings",
}


class Tracing:
    """One per worker. endpoint: base URL of the collector, to which `/v1/traces` is added."""

    def __init__(self, endpoint: str, worker: str) -> None:
        resource = Resource.create({"service.name": "appliance-gateway", "service.instance.id": worker})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("appliance.gateway")

    def begin(self, request: Request) -> None:
        """Attach spans to the request and set its `traceparent` to their trace."""
        request.spans = RequestSpans(self._tracer, request)
        request.trace = _traceparent(request.spans.span)

    def close(self) -> None:
        """Send remaining spans; blocks for EXPORT_TIMEOUT_S at most: the SDK takes that long for each batch."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(EXPORT_TIMEOUT_S)


class RequestSpans:
    """The spans of one request."""

    def __init__(self, tracer: trace.Tracer, request: Request) -> None:
        self._tracer, self._request, self._attempts = tracer, request, 0
        waited_s = time.monotonic() - request.received_s
        self.span: Span = tracer.start_span(
            "request",
            context=_W3C.extract({"traceparent": request.trace.decode()}),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(waited_s * 1e9),
            attributes={"http.route": request.route.name, "request_id": request.request_id.decode()},
        )
        self._context = set_span_in_context(self.span)

    @contextmanager
    def part(self, name: str) -> Iterator[bytes]:
        """A "hold", or an "attempt" at the replica that the request is on now. Gives its `traceparent`."""
        kind, ids = SpanKind.INTERNAL, dict[str, str | int]()
        if name == "attempt":
            self._attempts += 1
            request, kind = self._request, SpanKind.CLIENT
            ids = {"replica": request.replica, "version": request.model_version, "attempt": self._attempts}
        span = self._tracer.start_span(name, context=self._context, kind=kind, attributes=ids)
        try:
            yield _traceparent(span)
        except BaseException:
            span.set_status(_FAILED)
            raise
        finally:
            span.end()

    def end(self) -> None:
        self._request.spans = None  # they refer to each other
        self.span.set_attributes(_attributes(self._request))
        if self._request.status >= 500:
            self.span.set_status(_FAILED)
        self.span.end()


def _attributes(request: Request) -> dict[str, str | int | float]:
    """Attributes of a finished request; `gen_ai.*` after OpenTelemetry's conventions for generative AI, which are in
    development."""
    version, tokens = request.model_version, request.tokens
    attributes: dict[str, str | int | float] = {
        "http.response.status_code": request.status,
        "model": request.model,
        "version": version,
        "key_id": request.caller.id,
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "gen_ai.provider.name": "appliance",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": f"{request.model}@{version}" if version else request.model,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.cache_read.input_tokens": tokens.found,
        "gen_ai.usage.output_tokens": tokens.completion,
    }
    if request.route.name in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[request.route.name]
    if request.stream_events:
        attributes["gen_ai.response.time_to_first_chunk"] = request.first_byte_s - request.received_s
    if request.status >= 400:
        attributes["error.type"] = str(request.status)
    return attributes


def _traceparent(span: Span) -> bytes:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span))
    return carrier["traceparent"].encode()
