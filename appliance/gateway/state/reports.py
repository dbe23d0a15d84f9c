"""Builds one gateway's load report for the controller, and its Prometheus text."""

from __future__ import annotations

import time
from typing import Any, Final

from appliance.gateway.observe.exposition import render
from appliance.gateway.observe.metrics import RECENT_S
from appliance.gateway.state.state import State

Gauge = tuple[str, str, dict[str, str], int | float]
# Number of skipped table rows that a report lists one by one.
REFUSED_ROWS_REPORTED: Final = 10


class Reported:
    """What the reports on one connection to the controller have said of models.

    The first says all that was asked, later ones what changed: ten thousand names, each asked once, took 0.07 s of the
    loop four times a second, and twice as much of the controller's for each gateway.
    """

    def __init__(self) -> None:
        self.table = -1
        self._names: set[str] = set()
        self._busy: set[str] = set()
        # Since when each of these is reported to have times of the last minute, the longest ago first.
        self._recent: dict[str, float] = {}

    def changed(self, state: State, busy: set[str], now_s: float) -> set[str]:
        """Models that the next report has to say, those that left the table among them. busy: those with requests."""
        found = state.metrics.take_touched() | busy | self._busy
        if self.table != state.tables_applied:
            self.table = state.tables_applied
            found |= self._names ^ _used(state)
        while self._recent:
            name, reported_s = next(iter(self._recent.items()))
            if now_s - reported_s <= RECENT_S:
                break
            del self._recent[name]
            found.add(name)
        self._busy = busy
        return found

    def note(self, rows: dict[str, dict[str, Any] | None], now_s: float) -> None:
        for name, row in rows.items():
            self._recent.pop(name, None)
            if row is None:
                self._names.discard(name)
                continue
            self._names.add(name)
            if row["ttft_p95_s"] is not None or row["tpot_p95_s"] is not None:
                self._recent[name] = now_s


def _used(state: State) -> set[str]:
    """Models of the table that somebody has asked since this process began."""
    return {name for name in state.router.models if state.metrics.arrivals(name)[0]}


def load_report(state: State, reported: Reported | None = None) -> dict[str, Any]:
    """The load report of the bus, after what was `reported`; without it, a whole one. A model that nobody has asked
    since this process began has no row in it; one that has left the table has null.

    last_request_s: Unix time, None before the first; ttft_p95_s, tpot_p95_s: of the last minute, None without requests.
    arrived_*, first_tokens: since `started_s`; arrived_prompts and first_tokens by bucket of size and of time.
    waiting_prompt_tokens: of requests without a first token, as far as visible: non-streaming requests only while they
    are held; prompt_tokens: of all in flight and held. computed_part: see `Metrics.computed_part`.
    """
    now = time.monotonic()
    unix_offset_s = time.time() - now
    inflight: dict[str, int] = {}
    waiting: dict[str, int] = {}
    prompts: dict[str, int] = {}
    for one in state.exchanges:
        if name := one.row:
            inflight[name] = inflight.get(name, 0) + 1
            waiting[name] = waiting.get(name, 0) + one.waiting_tokens
            prompts[name] = prompts.get(name, 0) + one.prompt_tokens
    busy = {*inflight, *state.holds.models()}
    whole = reported is None or reported.table < 0
    names = _used(state) | busy if reported is None else reported.changed(state, busy, now)
    rows = {
        name: {
            "inflight": inflight.get(name, 0) - state.holds.held(name),
            "held": state.holds.held(name),
            "last_request_s": state.metrics.last_request_s(name, unix_offset_s),
            "ttft_p95_s": state.metrics.ttft_p95_s(name, now),
            "tpot_p95_s": state.metrics.tpot_p95_s(name, now),
            "waiting_prompt_tokens": waiting.get(name, 0),
            "prompt_tokens": prompts.get(name, 0),
            "computed_part": state.metrics.computed_part(name),
            "prefill_tokens_per_s": state.metrics.prefill_tokens_per_s(name),
            "arrived_requests": state.metrics.arrivals(name)[0],
            "arrived_prompt_tokens": state.metrics.arrivals(name)[1],
            "arrived_prompts": state.metrics.prompt_sizes(name),
            "first_tokens": state.metrics.first_tokens(name),
        }
        if name in state.router.models
        else None
        for name in names
    }
    if reported is not None:
        reported.note(rows, now)
    return {
        "type": "load",
        "generation": state.generation,
        "gateway": state.config.name,
        "started_s": state.started_s,
        "replicas": state.router.report(),
        "whole": whole,
        "models": {name: row for name, row in rows.items() if row is not None} if whole else rows,
        "canaries": state.comparison.report(),
        "notes": notes(state),
        "certificate_expires_s": None if state.certificate is None else state.certificate.expires_s,
    }


def notes(state: State) -> list[str]:
    """Problems of this gateway for the box's status page."""
    lines = [f"the gateway skips a row of its table: {text}" for text in state.refused_rows[:REFUSED_ROWS_REPORTED]]
    if len(state.refused_rows) > REFUSED_ROWS_REPORTED:
        lines.append(f"the gateway skips {len(state.refused_rows) - REFUSED_ROWS_REPORTED} more rows of its table")
    if state.certificate is not None:
        lines += state.certificate.notes(time.time())
    return lines


def metrics_text(state: State, *, controller_up: bool) -> bytes:
    """Series of this gateway, all its workers together."""
    up: Gauge = ("appliance_controller_up", "Whether the controller answered this scrape.", {}, int(controller_up))
    families = state.metrics.families([*gauges(state), up])
    return render(families if state.snapshots is None else state.snapshots.joined(families))


def gauges(state: State) -> list[Gauge]:
    rows: list[Gauge] = [
        ("appliance_gateway_connections", "Open client connections.", {}, len(state.connections)),
        ("appliance_gateway_table_generation", "Routing table in force, -1 before the first.", {}, state.generation),
        ("appliance_gateway_buffered_body_bytes", "Request bodies in memory.", {}, state.buffered_bytes),
        ("appliance_gateway_start_time_seconds", "Unix time of the start.", {}, state.started_s),
    ]
    rows += [
        ("appliance_gateway_held", "Requests waiting for a replica.", {"model": name}, state.holds.held(name))
        for name in sorted({*state.metrics.models, *state.holds.models()})  # not ten thousand that nobody asks
    ]
    rows += [
        ("appliance_gateway_inflight", "Requests on a replica.", {"replica": name}, load.inflight)
        for name, load in state.router.loads.items()
    ]
    if state.certificate is not None:
        rows.append(
            (
                "appliance_tls_expiry_seconds",
                "Unix time at which the endpoint's certificate expires.",
                {},
                state.certificate.expires_s,
            )
        )
    rows.append(
        (
            "appliance_gateway_table_rows_refused",
            "Rows of the table in force that are skipped.",
            {},
            len(state.refused_rows),
        )
    )
    rows += [
        ("appliance_gateway_degraded", "1 while a part of the gateway fails and is tried again.", {"part": name}, 1)
        for name in state.background.names()
    ]
    compared = list(state.comparison.rows())
    rows += [
        ("appliance_gateway_canary_requests", "Since the canary began, by version.", labels, requests)
        for labels, requests, _ in compared
    ]
    rows += [("appliance_gateway_canary_errors", "Of these, failed.", labels, errors) for labels, _, errors in compared]
    return rows
