"""The gateway's messages, and its load. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, json

_MAX_NOTES = 32


class ModelLoad(Struct, frozen=True):
    """Requests for one model. held: waiting for a replica. waiting_prompt_tokens: of requests known to have no first
    token yet; prompt_tokens: of all. computed_part: tokens that engines compute for an estimated one.
    prefill_tokens_per_s: of one replica. None where unknown.

    arrived_prompts: since the gateway began, requests by bucket of their prompt tokens
    (`appliance.gateway.core.table`)."""

    inflight: int = 0
    held: int = 0
    last_request_s: float | None = None
    tpot_p95_s: float | None = None
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    computed_part: float | None = None
    prefill_tokens_per_s: float | None = None
    arrived_prompts: dict[int, int] = {}


class VersionLoad(Struct, frozen=True):
    """Counts for one version since a canary began. first_byte, duration: those that succeeded, by bucket of their time
    (`appliance.gateway.core.table`)."""

    requests: int = 0
    errors: int = 0
    first_byte: dict[int, int] = {}
    duration: dict[int, int] = {}


class CanaryLoad(Struct, frozen=True):
    since_s: float
    versions: dict[str, VersionLoad]


class Report(Struct, frozen=True, tag_field="type", tag="load"):
    """generation: of the table that the gateway has applied. started_s: Unix time at which its process began."""

    gateway: str
    generation: int
    replicas: dict[str, dict[str, int]] = {}
    models: dict[str, ModelLoad] = {}
    canaries: dict[str, CanaryLoad] = {}
    started_s: float = 0.0
    notes: list[str] = []
    certificate_expires_s: float | None = None


class Usage(Struct, frozen=True, tag_field="type", tag="usage"):
    rows: list[dict[str, Any]]


MESSAGE = json.Decoder(Report | Usage)
"""Raises msgspec.DecodeError."""


class Load(NamedTuple):
    """replicas: requests at each. canaries: by model and start time of its canary, then by version. notes: for users.
    certificate_expires_s: of the endpoint's certificate, None without TLS."""

    replicas: Mapping[str, int] = {}
    models: Mapping[str, ModelLoad] = {}
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = {}
    notes: Sequence[str] = ()
    certificate_expires_s: float | None = None

    @classmethod
    def of(cls, report: Report) -> Load:
        replicas = {name: row.get("inflight", 0) for name, row in report.replicas.items()}
        canaries = {(name, canary.since_s): canary.versions for name, canary in report.canaries.items()}
        return cls(replicas, report.models, canaries, report.notes[:_MAX_NOTES], report.certificate_expires_s)


class Arrivals:
    """What arrived since it was last taken, from reports that count since the gateway's start.

    A gateway that was there before `since_s` (Unix time) counts from its first report: a restarted controller would
    take days of traffic for one burst. A name that a report lacks left the table, and counts from nothing later.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._last: Report | None = None
        self._new: dict[str, Counter[int]] = {}

    def add(self, report: Report) -> None:
        last, self._last = self._last, report
        if last is not None and report.started_s == last.started_s:
            before = last.models
        else:
            before = report.models if report.started_s < self._since_s else {}
        for name, row in report.models.items():
            known = Counter(before.get(name, ModelLoad()).arrived_prompts)
            self._new.setdefault(name, Counter()).update(Counter(row.arrived_prompts) - known)

    def take(self) -> dict[str, Counter[int]]:
        """By model, requests by the buckets of `ModelLoad`."""
        new, self._new = self._new, {}
        return new
