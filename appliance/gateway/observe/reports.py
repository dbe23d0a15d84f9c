"""What one gateway says of itself: the load report for the controller, and Prometheus text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from appliance.gateway.inference.handler import InferenceHandler
from appliance.gateway.observe.exposition import render

if TYPE_CHECKING:
    from appliance.gateway.gateway import Gateway

Gauge = tuple[str, str, dict[str, str], int | float]


def load_report(gateway: Gateway) -> dict[str, Any]:
    """The load report of the bus.

    last_request_s: Unix time, None before the first; ttft_p95_s, tpot_p95_s: of the last minute, None without
    requests. arrived_*: since `started_s`. waiting_prompt_tokens: of requests without a first token, as far as
    that can be seen: of those that are not streamed only while they are held.
    """
    now = time.monotonic()
    unix_offset_s = time.time() - now
    inflight: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for conn in gateway.connections:
        if conn.active is not None and isinstance(conn.active, InferenceHandler):
            name = conn.active.row
            inflight[name] = inflight.get(name, 0) + 1
            waiting[name] = waiting.get(name, 0) + conn.active.waiting_prompt_tokens
    return {
        "type": "load",
        "generation": gateway.generation,
        "gateway": gateway.config.name,
        "started_s": gateway.started_s,
        "replicas": gateway.router.report(),
        "models": {
            name: {
                "inflight": inflight.get(name, 0) - gateway.holds.held(name),
                "held": gateway.holds.held(name),
                "last_request_s": gateway.metrics.last_request_s(name, unix_offset_s),
                "ttft_p95_s": gateway.metrics.ttft_p95_s(name, now),
                "tpot_p95_s": gateway.metrics.tpot_p95_s(name, now),
                "waiting_prompt_tokens": waiting.get(name, 0),
                "prefill_tokens_per_s": gateway.metrics.prefill_tokens_per_s(name),
                "arrived_requests": gateway.metrics.arrivals(name)[0],
                "arrived_prompt_tokens": gateway.metrics.arrivals(name)[1],
            }
            for name in gateway.router.models
        },
        "canaries": gateway.comparison.report(),
        "notes": gateway.notes(),
        "certificate_expires_s": None if gateway.certificate is None else gateway.certificate.expires_s,
    }


def metrics_text(gateway: Gateway, *, controller_up: bool) -> bytes:
    """Series of this gateway, all its workers together."""
    up: Gauge = ("appliance_controller_up", "Whether the controller answered this scrape.", {}, int(controller_up))
    families = gateway.metrics.families([*gauges(gateway), up])
    return render(families if gateway.snapshots is None else gateway.snapshots.joined(families))


def gauges(gateway: Gateway) -> list[Gauge]:
    rows: list[Gauge] = [
        ("appliance_gateway_connections", "Open client connections.", {}, len(gateway.connections)),
        ("appliance_gateway_table_generation", "Routing table in force, -1 before the first.", {}, gateway.generation),
        ("appliance_gateway_buffered_body_bytes", "Request bodies in memory.", {}, gateway.buffered_bytes),
        ("appliance_gateway_start_time_seconds", "Unix time of the start.", {}, gateway.started_s),
    ]
    rows += [
        ("appliance_gateway_held", "Requests waiting for a replica.", {"model": name}, gateway.holds.held(name))
        for name in gateway.router.models
    ]
    rows += [
        ("appliance_gateway_inflight", "Requests on a replica.", {"replica": name}, load.inflight)
        for name, load in gateway.router.loads.items()
    ]
    if gateway.certificate is not None:
        rows.append(
            ("appliance_tls_expiry_seconds", "Unix time at which the endpoint's certificate expires.", {},
             gateway.certificate.expires_s)
        )  # fmt: skip
    rows.append(
        ("appliance_gateway_table_rows_refused", "Rows of the table in force that are skipped.", {},
         len(gateway.refused_rows))
    )  # fmt: skip
    compared = list(gateway.comparison.rows())
    rows += [
        ("appliance_gateway_canary_requests", "Since the canary began, by version.", labels, requests)
        for labels, requests, _ in compared
    ]
    rows += [("appliance_gateway_canary_errors", "Of these, failed.", labels, errors) for labels, _, errors in compared]
    return rows
