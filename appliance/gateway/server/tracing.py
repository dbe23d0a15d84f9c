"""Sends OpenTelemetry traces of inference requests over OTLP/HTTP. Imported only if an endpoint is configured.

    request          from the complete request to the end of the answer; its parent is the client's `traceparent`
      hold           while the request waits for a replica
      attempt        from sending to a replica to its last byte or failure; the parent of the engine's span

A thread of the SDK sends spans in batches; an unreachable collector loses spans but delays no request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from appliance.gateway.server.exchange import Exchange

EXPORT_TIMEOUT_S = 3.0
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Exporter of traces. endpoint: base URL of the collector; `/v1/traces` is appended."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "appliance-gateway"}))
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("appliance.gateway")

    def begin(self, exchange: Exchange) -> None:
        """Begin the request's span and make it current in the request's coroutine."""
        waited_s = time.monotonic() - exchange.received_s
        exchange.span = self._tracer.start_span(
            "request",
            context=_W3C.extract({"traceparent": exchange.trace.decode()}),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(waited_s * 1e9),
            attributes={"http.route": exchange.route.name},
        )
        context.attach(set_span_in_context(exchange.span))
        exchange.trace = _traceparent()

    @contextmanager
    def part(self, name: str, **attributes: str | int) -> Iterator[bytes]:
        """Trace a "hold" or an "attempt" of the current request. Yields its `traceparent`."""
        kind = SpanKind.CLIENT if name == "attempt" else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(name, kind=kind, attributes=attributes, record_exception=False):
            yield _traceparent()

    def end(self, exchange: Exchange) -> None:
        """End the span, with the `gen_ai.*` attributes of OpenTelemetry's draft conventions for generative AI."""
        span, route, tokens, model = exchange.span, exchange.route, exchange.tokens, exchange.model
        kind = "embeddings" if route.task == "embed" else "chat" if route.converses else "text_completion"
        attributes: dict[str, str | int | float] = {
            **exchange.ids,
            "http.response.status_code": exchange.status,
            "gen_ai.operation.name": kind,
            "gen_ai.provider.name": "appliance",
            "gen_ai.request.model": model,
            "gen_ai.response.model": f"{model}@{exchange.model_version}" if exchange.model_version else model,
            "gen_ai.usage.input_tokens": tokens.prompt,
            "gen_ai.usage.cache_read.input_tokens": tokens.cached,
            "gen_ai.usage.output_tokens": tokens.completion,
        }
        if exchange.stream_events:
            attributes["gen_ai.response.time_to_first_chunk"] = exchange.first_byte_s - exchange.received_s
        if exchange.status >= 400:
            attributes["error.type"] = str(exchange.status)
        if exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.set_attributes(attributes)
        span.end()

    def close(self) -> None:
        """Send remaining spans, for at most EXPORT_TIMEOUT_S in all; the SDK would allow that time for each batch."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(EXPORT_TIMEOUT_S)


def _traceparent() -> bytes:
    now = get_current_span().get_span_context()
    return b"00-%032x-%016x-%02x" % (now.trace_id, now.span_id, now.trace_flags)
